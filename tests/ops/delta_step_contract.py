"""What every implementation of a delta rule's decode step is held to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.contract import (
    assert_traces_once,
    assert_within_budget,
    impls_on,
    skip_reason,
)
from tests.ops.delta_step_cases import Case, Inputs
from tests.ops.delta_step_family import Family
from tests.ops.pages import offsets

DEVICE = "cpu"
POOLS = ("conv_state", "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the reference makes of inputs, in float64 and in their own dtype."""

    inputs: Inputs
    exact: Inputs
    out_exact: Tensor
    reference: Inputs
    out_reference: Tensor

    def check(self, out: Tensor, inputs: Inputs) -> None:
        assert out.dtype == self.inputs.qkv.dtype
        assert_within_budget(out, self.out_exact, self.out_reference)
        num_tokens = int(inputs.cu_seqlens[-1])
        assert torch.equal(out[num_tokens:], torch.zeros_like(out[num_tokens:]))
        slots = written_slots(inputs)
        assert torch.equal(inputs.conv_state[slots], self.reference.conv_state[slots])
        assert_within_budget(
            inputs.state[slots], self.exact.state[slots], self.reference.state[slots]
        )


@cache
def expect(family: Family, case: Case, dtype: torch.dtype) -> Expected:
    """What a family's reference makes of a case."""
    inputs = family.make_inputs(case, dtype)
    exact, own = inputs.exact(), inputs.copy()
    return Expected(
        inputs=inputs,
        exact=exact,
        out_exact=family.by_reference(exact),
        reference=own,
        out_reference=family.by_reference(own),
    )


class DeltaStepContract:
    """The tests; a family's own class names the family and adds what is peculiar to it."""

    family: ClassVar[Family]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        names = impls_on(DEVICE, self.family.implementations)
        kinds = {
            "impl": names,
            "host_impl": [name for name in names if name != "triton"],  # they read offsets
            "native_impl": ["cpp"],
        }
        for kind, members in kinds.items():
            if kind in metafunc.fixturenames:
                metafunc.parametrize(kind, self._parameters(members))
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.family.cases.values(), ids=self.family.cases)

    def _parameters(self, names: Iterable[str]) -> list[object]:
        reasons = {n: skip_reason(self.family.implementations[n], DEVICE) for n in names}
        return [
            pytest.param(name, marks=pytest.mark.skipif(reason is not None, reason=str(reason)))
            for name, reason in reasons.items()
        ]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_it_is_as_exact_as_the_reference(self, impl: str, case: Case, dtype: torch.dtype):
        expected = expect(self.family, case, dtype)
        inputs = expected.inputs.copy()
        expected.check(self.family.run(inputs, impl), inputs)

    def test_it_is_as_exact_in_fp16(self):
        expected = expect(self.family, self.family.cases["mixed"], torch.float16)
        inputs = expected.inputs.copy()
        expected.check(self.family.run(inputs, "torch"), inputs)

    def test_the_reference_is_its_parts(self, case: Case):
        """The convolution's op and, of the rule and what a layer does, the definitions."""
        inputs = self.family.make_inputs(case)
        parts = inputs.copy()
        num_tokens = int(inputs.cu_seqlens[-1])
        out, expected = self.family.by_reference(inputs), self.family.by_parts(parts, "torch")
        torch.testing.assert_close(out[:num_tokens], expected[:num_tokens])
        slots = written_slots(inputs)
        assert torch.equal(inputs.conv_state[slots], parts.conv_state[slots])
        torch.testing.assert_close(inputs.state[slots], parts.state[slots])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    def test_states_are_those_of_the_parts_where_gates_are(
        self, native_impl: str, dtype: torch.dtype
    ):
        """To the last bit, and what is read from them within what the norm rounds."""
        inputs = self.family.make_inputs(self.family.cases["mixed"], dtype)
        # Gates that no exponential rounds: rates of 0, and steps of a half and of one.
        b = torch.where(inputs.b > 0, 200, 0).to(dtype)
        inputs = replace(inputs, A_log=torch.full_like(inputs.A_log, -torch.inf), b=b)
        parts = inputs.copy()
        out, expected = self.family.run(inputs, native_impl), self.family.by_parts(parts, "cpp")
        assert_same_pools(inputs, parts)
        num_tokens = int(inputs.cu_seqlens[-1])
        torch.testing.assert_close(out[:num_tokens], expected[:num_tokens])

    def test_padding_changes_nothing(self, impl: str):
        """Padding tokens and empty sequences: zeros, and no other bit."""
        plain = self.family.mixed(num_padding_tokens=0)
        num_tokens = int(plain.cu_seqlens[-1])
        padded = replace(
            plain.copy(),
            **plain.tokens(torch.arange(num_tokens + 6) % num_tokens),
            cu_seqlens=F.pad(plain.cu_seqlens, (0, 2), value=num_tokens),
            initial_indices=F.pad(plain.initial_indices, (0, 2)),
            state_indices=F.pad(plain.state_indices, (0, 2)),
        )
        out_plain, out_padded = self.family.run(plain, impl), self.family.run(padded, impl)
        assert torch.equal(out_padded[:num_tokens], out_plain)
        assert torch.equal(out_padded[num_tokens:], torch.zeros_like(out_padded[num_tokens:]))
        assert_same_pools(padded, plain)

    def test_neighbours_do_not_matter(self, impl: str):
        """Each sequence alone, and all of them in another order: the same bits."""
        inputs = self.family.mixed(lengths=(1,) * 5, num_padding_tokens=0)
        order = torch.tensor([3, 0, 4, 1, 2])
        index = {n: getattr(inputs, n)[order] for n in ("initial_indices", "state_indices")}
        shuffled = replace(inputs.copy(), **inputs.tokens(order), **index)
        alone = inputs.copy()
        outs = [self.family.run(one_of(alone, n), impl) for n in range(5)]
        out, out_shuffled = self.family.run(inputs, impl), self.family.run(shuffled, impl)
        assert torch.equal(out_shuffled, out[order])
        assert_same_pools(shuffled, inputs)
        if impl != "torch":  # whose products are batched
            assert torch.equal(torch.cat(outs), out)
            assert_same_pools(alone, inputs)

    def test_a_start_from_another_slot_leaves_it_untouched(self, impl: str):
        """A fork, or a restored prefix: what several sequences start from is there afterwards."""
        inputs = self.family.mixed()
        num_slots, starts = len(inputs.state), inputs.initial_indices.clone()
        starts[2:] = starts[0]
        in_place = inputs.copy()
        for name in POOLS:
            getattr(in_place, name)[inputs.state_indices] = getattr(inputs, name)[starts]
        in_place = replace(in_place, initial_indices=inputs.state_indices * (starts > 0))
        pools = {n: getattr(inputs, n) for n in POOLS}
        elsewhere = replace(
            inputs,
            **{n: torch.cat([pool, torch.full_like(pool, torch.nan)]) for n, pool in pools.items()},
            initial_indices=starts,
            state_indices=inputs.state_indices + num_slots,
        )
        assert torch.equal(self.family.run(elsewhere, impl), self.family.run(in_place, impl))
        halves = {n: getattr(elsewhere, n).split(num_slots) for n in POOLS}
        assert_same_pools(replace(inputs, **{n: half[0] for n, half in halves.items()}), inputs)
        slots = written_slots(in_place)
        for name in POOLS:
            assert torch.equal(halves[name][1][slots], getattr(in_place, name)[slots])

    def test_a_state_that_is_not_stored_changes_nothing(self, impl: str):
        """A look ahead: the outputs, and every slot as it was."""
        inputs = self.family.mixed()
        tried = replace(inputs.copy(), state_indices=torch.zeros_like(inputs.state_indices))
        assert torch.equal(self.family.run(tried, impl), self.family.run(inputs.copy(), impl))
        assert_same_pools(tried, inputs)

    def test_no_other_slot_changes(self, impl: str):
        """Canaries in the null slot, the slots of empty sequences, those of nobody and the last."""
        inputs = self.family.mixed()
        pools = {n: getattr(inputs, n) for n in POOLS}
        canaries = {n: torch.arange(p.numel(), dtype=p.dtype).view_as(p) for n, p in pools.items()}
        inputs = replace(inputs, **{n: canary.clone() for n, canary in canaries.items()})
        others = torch.ones(len(inputs.state), dtype=torch.bool)
        others[written_slots(inputs).long()] = False
        assert others[-1]
        self.family.run(inputs, impl)
        for name, canary in canaries.items():
            pool = getattr(inputs, name)
            assert torch.equal(pool[others], canary[others])
            assert not (pool[~others] == canary[~others]).flatten(1).all(1).any()

    def test_rows_may_lie_apart(self, impl: str):
        """Slices of a projection give the same bits as contiguous tensors."""
        dtype = torch.bfloat16 if impl == "cpp" else torch.float32
        sliced = self.family.make_inputs(self.family.cases["mixed"], dtype)
        assert not sliced.z.is_contiguous()
        rows = {name: x.contiguous() for name, x in sliced.tokens(slice(None)).items()}
        dense = replace(sliced.copy(), **rows)
        assert torch.equal(self.family.run(sliced, impl), self.family.run(dense, impl))
        assert_same_pools(sliced, dense)

    @pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=str)
    def test_nothing_to_do(self, impl: str, lengths: tuple[int, ...]):
        inputs = self.family.mixed(lengths=lengths, num_padding_tokens=2)
        before = inputs.copy()
        assert torch.equal(self.family.run(inputs, impl), torch.zeros(inputs.z.shape))
        assert_same_pools(inputs, before)

    def test_sequences_of_several_tokens_are_refused(self, host_impl: str):
        inputs = self.family.mixed(lengths=(1, 2), num_padding_tokens=0)
        before = inputs.copy()
        with pytest.raises(ValueError, match=r"one token or none, got lengths \[1, 2\]"):
            self.family.run(inputs, host_impl)
        assert_same_pools(inputs, before)

    def test_opcheck(self, impl: str):
        inputs = self.family.mixed(has_bias=True)
        inputs = replace(inputs, **{n: getattr(inputs, n).nan_to_num() for n in POOLS})
        overload = getattr(torch.ops.torch_hybrid, self.family.op.__name__).default
        torch.library.opcheck(overload, inputs.args(), {**inputs.options(), "impl": impl})

    def test_one_trace_serves_all_batches(self):
        first = self.family.mixed(lengths=(1,) * 7, num_padding_tokens=0)
        options = first.options()
        pools = [torch.randn(23, *pool.shape[1:]) for pool in (first.conv_state, first.state)]
        batches = []
        for num_seqs in (7, 4, 2, 9):
            inputs = self.family.mixed(lengths=(1,) * num_seqs, num_padding_tokens=0)
            batches.append(replace(inputs, conv_state=pools[0], state=pools[1]).args())

        def step(*args: Tensor) -> Tensor:
            return self.family.op(*args, **options, impl="torch") * 2

        assert_traces_once(step, batches)

    def test_unknown_implementation(self):
        with pytest.raises(ValueError, match="impl must be one of"):
            self.family.run(self.family.mixed(), "none")


def one_of(inputs: Inputs, n: int) -> Inputs:
    """Sequence n alone, of sequences of one token each; the pools are shared."""
    return replace(
        inputs,
        **inputs.tokens(slice(n, n + 1)),
        cu_seqlens=offsets((1,)),
        initial_indices=inputs.initial_indices[n : n + 1],
        state_indices=inputs.state_indices[n : n + 1],
    )


def written_slots(inputs: Inputs) -> Tensor:
    is_written = (inputs.cu_seqlens.diff() > 0) & (inputs.state_indices > 0)
    return inputs.state_indices[is_written]


def assert_same_pools(actual: Inputs, expected: Inputs) -> None:
    for name in POOLS:
        pools = getattr(actual, name), getattr(expected, name)
        torch.testing.assert_close(*pools, rtol=0, atol=0, equal_nan=True)
