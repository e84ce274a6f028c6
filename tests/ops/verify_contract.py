"""What every implementation of a step that verifies drafts is held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.devices import needs_cuda
from tests.ops.contract import assert_within_budget, impls_on, skip_reason
from tests.ops.pages import offsets
from tests.ops.recurrent_triton import on_device
from tests.ops.step_family import Family
from torch_hybrid.ops.composed import COMPOSED
from torch_hybrid.ops.step_implementations import VERIFY

DEVICE = "cpu"
MOST_DRAFTS = 3
# Of four sequences, step by step: new tokens, and the drafts among them that turn out right.
ROUNDS = (
    ((4, 1, 2, 0), (3, 0, 0, 0)),
    ((1, 4, 4, 3), (0, 2, 3, 1)),
    ((0, 2, 3, 1), (0, 1, 1, 0)),
    ((3, 4, 0, 4), (0, 0, 0, 3)),
    ((2, 1, 1, 2), (1, 0, 0, 0)),
)


class VerifyContract:
    """The tests; a family's own class names it.

    Attributes:
        family: the decode step.
        records_are_inputs: whether records are of inputs alone, so that each implementation leaves
            the same.
        by_reference: the definition, of the step's value with records.
    """

    family: ClassVar[Family]
    records_are_inputs: ClassVar[bool] = True
    by_reference: ClassVar[Callable[..., Tensor]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        known = self.family.implementations
        names = impls_on(
            DEVICE, {n: i for n, i in known.items() if i.capability.features >= VERIFY}
        )
        kinds = {
            "impl": names,
            "native_impl": [name for name in names if name not in ("torch", COMPOSED)],
            "host_impl": [name for name in names if name != "triton"],  # they read counts
        }
        for kind, members in kinds.items():
            if kind in metafunc.fixturenames:
                reasons = {n: skip_reason(known[n], DEVICE) for n in members}
                metafunc.parametrize(
                    kind,
                    [
                        pytest.param(n, marks=pytest.mark.skipif(why is not None, reason=str(why)))
                        for n, why in reasons.items()
                    ],
                )
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.family.cases.values(), ids=self.family.cases)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_states_have_the_bits_of_plain_decoding(
        self, native_impl: str, case: Any, dtype: torch.dtype
    ):
        """Whatever was drafted, accepted and rejected; and outputs, where tokens are certain."""
        History(self, case, dtype, native_impl).check()

    @needs_cuda
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_states_have_the_bits_of_plain_decoding_on_a_gpu(self, case: Any, dtype: torch.dtype):
        History(self, case, dtype, "triton", "cuda").check()

    @needs_cuda
    def test_a_captured_graph_serves_other_counts_on_a_gpu(self):
        history = History(self, self.family.cases["mixed"], torch.float32, "triton", "cuda")
        history.verify = Captured(history)
        history.check()

    def test_it_is_what_its_steps_make(self, impl: str, case: Any):
        """Of one call, with records and without, against the definition in float64."""
        history = History(self, case, torch.float32, impl)
        history.advance(*ROUNDS[0])
        inputs, records = history.inputs.copy(), history.records.clone()
        given = history.given(ROUNDS[1][0])
        calls = {}
        for kind in ("actual", "own", "exact"):
            own = replace(given, **{n: pool.clone() for n, pool in inputs.held().items()})
            kept = records.clone()
            run: Callable[..., Tensor] = self.by_reference_of
            if kind == "exact":
                own, kept = own.exact(), kept.double()
            elif kind == "actual":
                run = self.run_of(impl)
            calls[kind] = run(own, kept, history.accepted), own, kept
        (out, left, kept), (out_own, left_own, kept_own), (out_exact, left_exact, kept_exact) = (
            calls[kind] for kind in ("actual", "own", "exact")
        )
        slots = given.state_indices[given.state_indices > 0]
        assert_within_budget(out, out_exact, out_own)
        assert_within_budget(left.state[slots], left_exact.state[slots], left_own.state[slots])
        if self.records_are_inputs:
            torch.testing.assert_close(kept, kept_own, rtol=0, atol=0, equal_nan=True)
        else:
            is_record = ~kept_own.isnan()
            assert torch.equal(~kept.isnan(), is_record)
            assert_within_budget(kept[is_record], kept_exact[is_record], kept_own[is_record])
        if "conv_state" in left.held():
            assert torch.equal(left.conv_state[slots], left_own.conv_state[slots])

    @pytest.mark.parametrize(
        ("lengths", "accepted", "message"),
        [
            ((5, 1, 1, 1), (0, 0, 0, 0), "a sequence must have at most 4 tokens, got lengths"),
            ((1, 1, 1, 1), (0, 4, 0, 0), r"accepted must be within 0 and 3, got \[0, 4, 0, 0\]"),
            ((1, 1, 1, 1), (-1, 0, 0, 0), r"accepted must be within 0 and 3, got \[-1, 0, 0, 0\]"),
            ((1, 1, 1, 1), (0, 0, 0, 1), "sequence 3 starts from the zero state and has no 1 rec"),
        ],
    )
    def test_counts_that_no_record_has_are_refused(
        self, host_impl: str, lengths: Sequence[int], accepted: Sequence[int], message: str
    ):
        history = History(self, self.family.cases["mixed"], torch.float32, host_impl)
        given = history.given(lengths)
        given = replace(given, initial_indices=torch.tensor([1, 2, 3, 0], dtype=torch.int32))
        given = replace(given, state_indices=torch.tensor([1, 2, 3, 4], dtype=torch.int32))
        before = given.copy()
        with pytest.raises(ValueError, match=message):
            self.run_of(host_impl)(
                given, history.records, torch.tensor(accepted, dtype=torch.int32)
            )
        for name, pool in given.held().items():
            torch.testing.assert_close(pool, before.held()[name], equal_nan=True)

    def test_records_go_with_counts(self):
        history = History(self, self.family.cases["mixed"], torch.float32, "torch")
        given = history.given((1, 1, 1, 1))
        verify, options = self.family.op, {**given.options(), "impl": "torch"}
        with pytest.raises(ValueError, match="together, got records alone"):
            verify(*given.args(), **options, records=history.records)
        with pytest.raises(ValueError, match="together, got accepted alone"):
            verify(*given.args(), **options, accepted=history.accepted)

    def run_of(self, impl: str) -> Callable[[Any, Tensor, Tensor], Tensor]:
        """The op, of a call's inputs, records and counts."""
        verify = self.family.op

        def run(inputs: Any, records: Tensor, accepted: Tensor) -> Tensor:
            drafts = {"records": records, "accepted": accepted}
            return verify(*inputs.args(), **drafts, **inputs.options(), impl=impl)

        return run

    def by_reference_of(self, inputs: Any, records: Tensor, accepted: Tensor) -> Tensor:
        return type(self).by_reference(replace(inputs, records=records, accepted=accepted))


class History:
    """Four sequences that are drafted for, and the same sequences decoded plainly.

    The first two have a state to start from. Each new token is one of a supply, which are random.
    """

    def __init__(
        self,
        contract: VerifyContract,
        case: Any,
        dtype: torch.dtype,
        impl: str,
        device: str = DEVICE,
    ) -> None:
        self.contract, self.impl, self.device = contract, impl, device
        self.verify = contract.run_of(impl)
        family = contract.family
        supply = replace(case, lengths=(1,) * 64, num_padding_tokens=0)
        self.supply = on_device(family.make_inputs(supply, dtype), device)
        pools = {n: pool[:6].nan_to_num() for n, pool in self.supply.held().items()}
        self.inputs = self.supply.changed(**pools).copy()
        self.plain = self.inputs.copy()
        self.records = self.inputs.empty_records(MOST_DRAFTS)
        self.slots = self.int32([2, 4, 1, 3])
        self.is_new = [False, False, True, True]
        self.accepted = self.int32([0] * 4)
        self.next_token, self.outputs_differ_by = 0, 0.0

    def given(self, lengths: Sequence[int], first: int | None = None) -> Any:
        """A call's inputs: so many new tokens of each sequence."""
        first = self.next_token if first is None else first
        initial = [0 if new else slot for new, slot in zip(self.is_new, self.slots, strict=True)]
        return self.inputs.changed(
            **self.supply.tokens(slice(first, first + sum(lengths))),
            cu_seqlens=offsets(tuple(lengths)).to(self.device),
            initial_indices=self.int32(initial),
            state_indices=self.slots,
        )

    def int32(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def check(self) -> None:
        """States and certain outputs have the bits of plain decoding after all rounds."""
        for lengths, right in ROUNDS:
            self.advance(lengths, right)
        self.flush()
        assert self.outputs_differ_by == 0
        for name, pool in self.inputs.held().items():
            assert torch.equal(pool, self.plain.held()[name]), name

    def advance(self, lengths: Sequence[int], right: Sequence[int]) -> None:
        """One step, and by plain decoding the tokens of it that turn out right."""
        first = self.next_token
        self.next_token = (first + sum(lengths)) % 48
        out = self.verify(self.given(lengths, first), self.records, self.accepted)
        place = first
        for n, (length, count) in enumerate(zip(lengths, right, strict=True)):
            for i in range(min(length, 1 + count)):
                expected = self.decode(n, place + i)
                differ = (expected - out[place - first + i]).abs().max()
                self.outputs_differ_by = max(self.outputs_differ_by, float(differ))
            place += length
            if length:
                self.is_new[n] = False
        self.accepted = self.int32(right)

    def decode(self, n: int, token: int) -> Tensor:
        """One token of one sequence by the decode step."""
        slot = self.slots[n : n + 1]
        given = self.plain.changed(
            **self.supply.tokens(slice(token, token + 1)),
            cu_seqlens=offsets((1,)).to(self.device),
            initial_indices=torch.zeros_like(slot) if self.is_new[n] else slot,
            state_indices=slot,
        )
        out = self.contract.family.run(given, self.impl)
        self.is_new[n] = False
        return out[0]

    def flush(self) -> None:
        """Replay what is certain, with no new tokens."""
        self.verify(self.given((0, 0, 0, 0)), self.records, self.accepted)
        self.accepted = self.int32([0] * 4)


class Captured:
    """The op on a history's pools in a CUDA graph: as many tokens as there may be, of which calls
    fill the first."""

    def __init__(self, history: History) -> None:
        most = 4 * (1 + MOST_DRAFTS)
        supply = history.supply.tokens(slice(0, most)).items()
        nothing = history.given((0, 0, 0, 0))
        self.inputs = nothing.changed(
            **{name: x.clone() for name, x in supply},
            initial_indices=torch.zeros_like(nothing.initial_indices),
            state_indices=nothing.state_indices.clone(),
        )
        self.accepted = torch.zeros_like(history.accepted)

        run = partial(history.verify, self.inputs, history.records, self.accepted)
        run()  # compiles the kernels, which cannot be done while capturing
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = run()

    def __call__(self, inputs: Any, records: Tensor, accepted: Tensor) -> Tensor:
        for name, x in inputs.tokens(slice(None)).items():
            getattr(self.inputs, name)[: len(x)] = x
        for name in ("cu_seqlens", "initial_indices", "state_indices"):
            getattr(self.inputs, name).copy_(getattr(inputs, name))
        self.accepted.copy_(accepted)
        self.graph.replay()
        return self.out.clone()
