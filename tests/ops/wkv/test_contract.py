"""What every implementation of RWKV's weighted average is held to."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

import expecttest
import pytest
import torch
from torch import Tensor
from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

from tests.ops.contract import (
    assert_traces_once,
    assert_within_budget,
    impls_on,
    pool_clones,
    skip_reason,
)
from tests.ops.pages import offsets
from tests.ops.wkv.cases import CASES, Case, Inputs, make_inputs
from torch_hybrid.ops.capability import BATCH_INVARIANT
from torch_hybrid.ops.wkv import wkv
from torch_hybrid.ops.wkv.op import IMPLEMENTATIONS
from torch_hybrid.ops.wkv.reference import wkv_reference

DEVICE = "cpu"

every_impl = pytest.mark.parametrize(
    "impl",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(reason is not None, reason=reason or "it runs here"),
        )
        for name in impls_on(DEVICE, IMPLEMENTATIONS)
        for reason in [skip_reason(IMPLEMENTATIONS[name], DEVICE)]
    ],
)
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the reference makes of inputs, in float64 and in their own dtype."""

    inputs: Inputs
    exact: Inputs
    out_exact: Tensor
    reference: Inputs
    out_reference: Tensor

    @classmethod
    def of(cls, inputs: Inputs) -> Expected:
        exact, reference, inputs = inputs.exact(), inputs.copy(), inputs.copy()
        return cls(
            inputs=inputs,
            exact=exact,
            out_exact=wkv_reference(*exact.args()),
            reference=reference,
            out_reference=wkv_reference(*reference.args()),
        )

    def check(self, out: Tensor, state: Tensor) -> None:
        """Outputs and states are as exact as the reference's; padding is zero, and all other slots
        are as they were."""
        assert out.dtype == self.inputs.k.dtype
        assert_within_budget(out, self.out_exact, self.out_reference)
        slots = _written_slots(self.inputs)
        assert_within_budget(state[slots], self.exact.state[slots], self.reference.state[slots])
        num_tokens = int(self.inputs.cu_seqlens[-1])
        assert torch.equal(out[num_tokens:], torch.zeros_like(out[num_tokens:]))
        others = torch.ones(len(state), dtype=torch.bool)
        others[slots.long()] = False
        torch.testing.assert_close(
            state[others], self.inputs.state[others], rtol=0, atol=0, equal_nan=True
        )


@cache
def expect(case: Case, dtype: torch.dtype) -> Expected:
    return Expected.of(make_inputs(case, dtype))


def _written_slots(inputs: Inputs) -> Tensor:
    is_written = (inputs.cu_seqlens.diff() > 0) & (inputs.state_indices > 0)
    return inputs.state_indices[is_written]


def _run(inputs: Inputs, impl: str) -> Tensor:
    return wkv(*inputs.args(), impl=impl)


@every_impl
@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_it_is_as_exact_as_the_reference(impl: str, case: Case, dtype: torch.dtype):
    expected = expect(case, dtype)
    inputs = expected.inputs.copy()
    expected.check(_run(inputs, impl), inputs.state)


@every_impl
def test_keys_that_no_exponential_holds(impl: str):
    """Weights of e^300 and of e^-300, after one another and beside a state of either."""
    inputs = make_inputs(Case(lengths=(40, 40)))
    sizes = torch.tensor([300.0, -300.0, 0.0]).repeat(27)[:80, None]
    inputs = replace(inputs, k=inputs.k + sizes, bonus=inputs.bonus * 100)
    inputs.state[:, 2] *= 300
    expected = Expected.of(inputs)
    expected.check(_run(inputs, impl), inputs.state)
    assert expected.out_exact.isfinite().all()


@every_impl
@pytest.mark.parametrize("log_decay", [0.0, -1e-6, -1e3, -1e30])
def test_any_decay(impl: str, log_decay: float):
    inputs = make_inputs(Case(lengths=(40, 3)))
    inputs = replace(inputs, log_decay=torch.full_like(inputs.log_decay, log_decay))
    expected = Expected.of(inputs)
    expected.check(_run(inputs, impl), inputs.state)


@every_impl
def test_segments_are_the_whole(impl: str):
    """Cutting a sequence anywhere changes nothing, nor does where a new one begins."""
    whole = make_inputs(Case(lengths=(150,)))
    for initial in (whole.initial_indices, whole.initial_indices * 0):
        uncut, cut = (replace(whole.copy(), initial_indices=initial) for _ in range(2))
        outs = []
        for start, end in [(0, 1), (1, 3), (3, 50), (50, 52), (52, 150)]:
            piece = replace(
                cut,
                **whole.tokens(slice(start, end)),
                cu_seqlens=offsets([end - start]),
                initial_indices=whole.state_indices if start else initial,
            )
            outs.append(_run(piece, impl))
        expected, slots = _run(uncut, impl), whole.state_indices
        torch.testing.assert_close(torch.cat(outs), expected)
        torch.testing.assert_close(cut.state[slots], uncut.state[slots])
        if BATCH_INVARIANT in IMPLEMENTATIONS[impl].capability.features:
            assert torch.equal(torch.cat(outs), expected)
            assert torch.equal(cut.state[slots], uncut.state[slots])


@every_impl
def test_the_first_token_of_a_new_sequence_is_its_own_mean(impl: str):
    inputs = make_inputs(Case(lengths=(1, 1)))
    assert inputs.initial_indices.tolist()[1] == 0
    out = _run(inputs, impl)
    torch.testing.assert_close(out[1], inputs.v[1])
    assert (out[0] - inputs.v[0]).abs().max() > 0.1


@every_impl
def test_order_of_sequences_does_not_matter(impl: str):
    inputs = make_inputs(replace(CASES["mixed"], num_padding_tokens=0))
    order = torch.tensor([3, 6, 0, 5, 1, 4, 2])
    spans = [torch.arange(a, b) for a, b in inputs.cu_seqlens.unfold(0, 2, 1).tolist()]
    tokens = torch.cat([spans[n] for n in order])
    shuffled = replace(
        inputs.copy(),
        **inputs.tokens(tokens),
        cu_seqlens=offsets([len(spans[n]) for n in order]),
        initial_indices=inputs.initial_indices[order],
        state_indices=inputs.state_indices[order],
    )
    out, out_shuffled = _run(inputs, impl), _run(shuffled, impl)
    torch.testing.assert_close(out_shuffled, out[tokens])
    torch.testing.assert_close(shuffled.state, inputs.state, equal_nan=True)


@every_impl
def test_a_start_from_another_slot_leaves_it_untouched(impl: str):
    """A fork, or a restored prefix: what several sequences start from is there afterwards."""
    inputs = make_inputs(CASES["mixed"])
    num_slots, starts = len(inputs.state), inputs.initial_indices.clone()
    starts[2:] = starts[0]
    in_place = inputs.copy()
    in_place.state[inputs.state_indices] = inputs.state[starts]
    in_place = replace(in_place, initial_indices=inputs.state_indices * (starts > 0))
    elsewhere = replace(
        inputs,
        state=torch.cat([inputs.state, torch.full_like(inputs.state, torch.nan)]),
        initial_indices=starts,
        state_indices=inputs.state_indices + num_slots,
    )
    assert torch.equal(_run(elsewhere, impl), _run(in_place, impl))
    both = elsewhere.state.split(num_slots)
    torch.testing.assert_close(both[0], inputs.state, rtol=0, atol=0, equal_nan=True)
    slots = _written_slots(in_place)
    assert torch.equal(both[1][slots], in_place.state[slots])


@every_impl
def test_a_state_that_is_not_stored_changes_nothing(impl: str):
    """A look ahead: the outputs, and every slot as it was."""
    inputs = make_inputs(CASES["mixed"])
    tried = replace(inputs.copy(), state_indices=torch.zeros_like(inputs.state_indices))
    assert torch.equal(_run(tried, impl), _run(inputs.copy(), impl))
    torch.testing.assert_close(tried.state, inputs.state, rtol=0, atol=0, equal_nan=True)


@every_impl
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=str)
def test_nothing_to_do(impl: str, lengths: tuple[int, ...]):
    inputs = make_inputs(Case(lengths=lengths, num_padding_tokens=2))
    before = inputs.copy()
    assert torch.equal(_run(inputs, impl), torch.zeros(2, 48))
    torch.testing.assert_close(inputs.state, before.state, rtol=0, atol=0, equal_nan=True)


@every_impl
def test_opcheck(impl: str):
    inputs = make_inputs(CASES["mixed"])
    inputs = replace(inputs, state=inputs.state.nan_to_num())
    torch.library.opcheck(torch.ops.torch_hybrid.wkv.default, inputs.args(), {"impl": impl})


@every_impl
def test_one_trace_serves_all_batches(impl: str):
    def step(*args: Tensor) -> Tensor:
        return wkv(*args, impl=impl) * 2

    batches = [
        [*make_inputs(Case(lengths=lengths)).args()]
        for lengths in [(3, 1, 2, 5, 1, 1, 7), (1,) * 4, (5, 6), (40, 1, 1, 7, 9)]
    ]
    state = torch.randn(23, 3, 48)
    for batch in batches:
        batch[4] = state
    assert_traces_once(step, batches)


@pytest.mark.slow
def test_no_clone_of_the_state_pool():
    """Whatever computes it: the compiler sees its schema alone."""

    def step(*args: Tensor) -> Tensor:
        return wkv(*args, impl="torch") * 2

    inputs = make_inputs(CASES["mixed"])
    assert pool_clones(step, inputs.args(), [inputs.state]) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": torch.zeros(8, 2, 24)}, "k must have 2 dimensions, got [8, 2, 24]"),
        ({"v": torch.zeros(8, 24)}, "v must have shape [8, 48], got [8, 24]"),
        (
            {"v": torch.zeros(8, 48).half()},
            "v must have dtype torch.float32, got torch.float16",
        ),
        ({"v": torch.zeros(48, 8).T}, "v must have contiguous rows, got strides [1, 8]"),
        ({"log_decay": torch.zeros(24)}, "log_decay must have shape [48], got [24]"),
        (
            {"bonus": torch.zeros(48).double()},
            "bonus must have dtype torch.float32, got torch.float64",
        ),
        ({"state": torch.zeros(5, 48)}, "state must have shape [5, 3, 48], got [5, 48]"),
        (
            {"initial_indices": torch.zeros(2)},
            "initial_indices must have dtype torch.int32, got torch.float32",
        ),
    ],
)
def test_errors_name_the_argument(changes: dict[str, object], message: str):
    inputs = replace(make_inputs(Case(lengths=(5, 3))), **changes)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        _run(inputs, "torch")


def test_reference_agrees_with_transformers():
    """From nothing, and on from a state."""
    inputs = make_inputs(Case(lengths=(30,), num_channels=16))
    slot = inputs.state_indices[0]
    for initial in (inputs.initial_indices, inputs.initial_indices * 0):
        before = inputs.state[slot].clone()[:, None].unbind() if initial[0] else None
        expected, after = rwkv_linear_attention_cpu(
            (-inputs.log_decay).log(),
            inputs.bonus,
            inputs.k[None],
            inputs.v[None],
            state=before,
            return_state=True,
        )
        out = wkv_reference(*replace(inputs, initial_indices=initial).args())
        torch.testing.assert_close(out, expected[0])
        torch.testing.assert_close(inputs.state[slot], torch.cat(after))


class TestSchema(expecttest.TestCase):
    def test_schema(self):
        schema = str(torch.ops.torch_hybrid.wkv.default._schema)
        self.assertExpectedInline(
            schema.replace(", ", "\n  "),
            """\
torch_hybrid::wkv(Tensor k
  Tensor v
  Tensor log_decay
  Tensor bonus
  Tensor(a!) state
  Tensor cu_seqlens
  Tensor initial_indices
  Tensor state_indices
  *
  str impl) -> Tensor""",
        )
