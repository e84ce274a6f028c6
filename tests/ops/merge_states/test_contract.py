"""The contract of merge_states, held by every implementation."""

from __future__ import annotations

import math

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.errors import error_text
from tests.ops.contract import assert_within_budget, impl_fixture
from torch_hybrid.ops.merge_states import merge_states, reference
from torch_hybrid.ops.merge_states.op import IMPLEMENTATIONS, MergeStates

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
State = tuple[Tensor, Tensor]
impl = impl_fixture(IMPLEMENTATIONS)


def make_states(
    count: int, num_tokens: int = 9, dtype: torch.dtype = torch.float32
) -> tuple[State, ...]:
    """States whose LSEs are far apart in places, and of which some rows have seen no key."""
    generator = torch.Generator().manual_seed(0)
    states = []
    for i in range(count):
        o = torch.randn(num_tokens, 3, 48, generator=generator)
        lse = torch.randn(num_tokens, 3, generator=generator) * 10
        empty = torch.arange(num_tokens) % (i + 3) == i
        states.append((o.masked_fill(empty[:, None, None], 0).to(dtype), lse))
        lse[empty] = -math.inf
    return tuple(states)


def empty_like(state: State) -> State:
    """The result over no keys."""
    return torch.zeros_like(state[0]), torch.full_like(state[1], -math.inf)


def assert_same(a: State, b: State) -> None:
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])


# ---- numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 9, 130])
def test_matches_float64(impl: str, num_tokens: int, dtype: str) -> None:
    if DTYPES[dtype] not in IMPLEMENTATIONS[impl].capability.dtypes:
        pytest.skip(f"{impl} has no {dtype}")
    a, b = make_states(2, num_tokens, DTYPES[dtype])
    out, lse = merge_states(*a, *b, impl=impl)
    rounded = reference.merge_states(MergeStates(*a, *b, impl=""))
    exact = reference.merge_states(MergeStates(*(x.double() for x in (*a, *b)), impl=""))
    assert out.dtype == DTYPES[dtype]
    assert lse.dtype == torch.float32
    assert_within_budget(out, exact[0], rounded[0])
    seen = exact[1].isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert_within_budget(lse[seen], exact[1][seen], rounded[1][seen])


def test_joins_a_softmax_cut_in_two(impl: str) -> None:
    """The logarithm is natural: with base 2 the parts would be weighed wrongly."""
    logits, values = torch.randn(5, 3, 40) * 4, torch.randn(40, 16)
    parts = [
        (logits[..., cut].softmax(2) @ values[cut], logits[..., cut].exp().sum(2).log())
        for cut in (slice(0, 31), slice(31, 40))
    ]
    out, lse = merge_states(*parts[0], *parts[1], impl=impl)
    torch.testing.assert_close(out, logits.softmax(2) @ values, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, logits.logsumexp(2), atol=1e-6, rtol=1e-5)


def test_identity(impl: str) -> None:
    """``(0, -inf)`` changes no bit on either side."""
    (state,) = make_states(1)
    assert_same(merge_states(*state, *empty_like(state), impl=impl), state)
    assert_same(merge_states(*empty_like(state), *state, impl=impl), state)


def test_identity_is_closed(impl: str) -> None:
    """Both sides empty: again ``(0, -inf)``, and no NaN."""
    empty = empty_like(make_states(1)[0])
    assert_same(merge_states(*empty, *empty, impl=impl), empty)


def test_commutative_up_to_rounding(impl: str) -> None:
    a, b = make_states(2)
    out, lse = merge_states(*a, *b, impl=impl)
    swapped_out, swapped_lse = merge_states(*b, *a, impl=impl)
    assert torch.equal(lse, swapped_lse)
    torch.testing.assert_close(out, swapped_out, atol=2e-7, rtol=2e-7)


def test_associative_up_to_rounding(impl: str) -> None:
    a, b, c = make_states(3)
    left = merge_states(*merge_states(*a, *b, impl=impl), *c, impl=impl)
    right = merge_states(*a, *merge_states(*b, *c, impl=impl), impl=impl)
    torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("lse", [-1e30, -3e4, 3e4, 1e30])
def test_extreme_lse_does_not_overflow(impl: str, lse: float) -> None:
    o = torch.ones(2, 1, 16)
    lse_a, lse_b = torch.full((2, 1), lse), torch.tensor([[lse], [0.0]])
    out, merged = merge_states(o, lse_a, o, lse_b, impl=impl)
    torch.testing.assert_close(out, o)
    torch.testing.assert_close(merged[1], torch.maximum(lse_a, lse_b)[1])


# ---- errors ----------------------------------------------------------------------------------


def test_error_texts() -> None:
    o, lse = make_states(1)[0]
    calls: list[tuple[Tensor, Tensor, Tensor, Tensor, str]] = [
        (o[0], lse, o, lse, "torch"),
        (o, lse, o[1:], lse, "torch"),
        (o, lse[:, :2], o, lse, "torch"),
        (o.int(), lse, o.int(), lse, "torch"),
        (o, lse, o.bfloat16(), lse, "torch"),
        (o, lse, o, lse.double(), "torch"),
        (o.transpose(0, 1).contiguous().transpose(0, 1), lse, o, lse, "torch"),
        (o, lse, o, lse, "tpu"),
        (o.half(), lse, o.half(), lse, "cpp"),
        (o[..., :40].contiguous(), lse, o[..., :40].contiguous(), lse, "cpp"),
    ]
    errors = []
    for *tensors, impl in calls:
        errors.append(error_text(ValueError, merge_states, *tensors, impl=impl))
    assert_expected_inline(
        "\n".join(errors),
        """\
o_a must have 3 dimensions, got 2
o_b must have shape [9, 3, 48], got [8, 3, 48]
lse_a must have shape [9, 3], got [9, 2]
o_a must be a floating point tensor, got torch.int32
o_b must have dtype torch.float32, got torch.bfloat16
lse_b must have dtype torch.float32, got torch.float64
o_a must be contiguous, got strides (48, 432, 1)
impl must be one of ['cpp', 'torch'], got 'tpu'
impl 'cpp' takes ['torch.bfloat16', 'torch.float32'], got tensors of torch.float16
impl 'cpp' cannot take these sizes: v_head_dim 40 is not a multiple of 16""",
    )
