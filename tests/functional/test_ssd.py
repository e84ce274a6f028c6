"""State space duality to train with: values and gradients of every implementation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from tests.functional.rules import (
    Tensors,
    assert_all_within_budget,
    assert_packed_is_single,
    assert_rounds_once,
    assert_same_bits_on_threads,
    offsets,
    on_a_cpu,
    packing,
    with_gradients,
)
from tests.ops.contract import assert_same_bits
from torch_hybrid.functional import ssd
from torch_hybrid.ops.ssd.reference import ssd_step

# One token, chunk borders of 32 and their neighbours, an empty sequence, and long ones.
LENGTHS = {
    "short": (1, 2, 0, 17),
    "borders": (31, 32, 33, 64, 65),
    "long": (300,),
    "mixed": (5, 100, 1, 0, 128, 66),
}
NAMES = ["y", "final_state", "dx", "ddt", "dA", "dB", "dC", "dD", "ddt_bias", "dinitial_state"]
BY_TOKEN = (0, 1, 3, 4)  # arguments with a row for each token
HEADS, GROUPS, P, N = 6, 2, 24, 16
DT_LIMIT = (0.01, 4.0)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


on_each = pytest.mark.parametrize("impl", [*on_a_cpu("ssd_backward")])


def inputs(lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensors:
    """Make x, dt, A, B, C, D, dt_bias and initial states; decays from almost 1 to e^-20."""
    T = sum(lengths)
    rows = [torch.randn(T, HEADS, P), torch.randn(T, HEADS), -torch.logspace(-4, 0.7, HEADS)]
    rows += [torch.randn(T, GROUPS, N) / 4, torch.randn(T, GROUPS, N) / 4]
    heads = [torch.randn(HEADS), torch.randn(HEADS)]
    made = [*rows, *heads, torch.randn(len(lengths), HEADS, P, N)]
    work = torch.promote_types(dtype, torch.float32)
    return [x.to(dtype if at in BY_TOKEN else work) for at, x in enumerate(made)]


def weights(xs: Tensors) -> Tensors:
    """Make random weights of outputs and final states."""
    return [torch.randn(xs[0].shape), torch.randn(xs[7].shape)]


def ours(xs: Tensors, lengths: Sequence[int] | None, impl: str) -> tuple[Tensor, Tensor]:
    packed = None if lengths is None else packing(lengths)
    y, final_state = ssd(*xs[:7], packed, xs[7], dt_limit=DT_LIMIT, impl=impl)
    assert final_state is not None
    return y, final_state


def exact(xs: Tensors, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Walk token by token through ``ssd_step``, in the dtype of the inputs."""
    x, dt, A, B, C, D, dt_bias, states = xs
    step = softplus(dt + dt_bias).clamp(*DT_LIMIT)
    B, C = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (B, C))
    out, final = [x.new_empty(0, HEADS, P)], []
    for S, (start, end) in zip(states, pairwise(offsets(lengths).tolist()), strict=True):
        for t in range(start, end):
            S, o = ssd_step(S, C[t], B[t], x[t], step[t] * A, step[t])
            out.append((o + D[:, None] * x[t])[None])
        final.append(S)
    return torch.cat(out), torch.stack(final)


def theirs(xs: Tensors, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Run transformers' chunks in torch, sequence by sequence."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    _, _, A, _, _, D, dt_bias, states = xs
    out, final = [xs[0].new_empty(0, HEADS, P)], []
    rows = zip(*(xs[at].split(list(lengths)) for at in BY_TOKEN), strict=True)
    for S, (x, dt, B, C) in zip(states, rows, strict=True):
        if len(x):
            y, S_end = mamba2_chunk_scan(
                *(x[None], dt[None], A, B[None], C[None]),
                chunk_size=64,
                D=D,
                dt_bias=dt_bias,
                initial_states=S[None],
                dt_softplus=True,
                dt_limit=DT_LIMIT,
                return_final_states=True,
            )
            out.append(y[0])
            S = S_end[0]
        final.append(S)
    return torch.cat(out), torch.stack(final)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@on_each
def test_gradients_within_twice_the_error_of_transformers(
    impl: str, lengths: tuple[int, ...]
) -> None:
    xs = inputs(lengths)
    w = weights(xs)
    made = with_gradients(lambda x: ours(x, lengths, impl), xs, w)
    wide = with_gradients(lambda x: exact(x, lengths), [x.double() for x in xs], w)
    other = with_gradients(lambda x: theirs(x, lengths), xs, w)
    assert_all_within_budget(NAMES, made, wide, other)


@pytest.mark.parametrize("A", [0.0, -20.0])
@on_each
def test_extreme_decays(impl: str, A: float) -> None:
    lengths = (70, 3)
    xs = inputs(lengths)
    xs[2].fill_(A)
    w = weights(xs)
    made = with_gradients(lambda x: ours(x, lengths, impl), xs, w)
    wide = with_gradients(lambda x: exact(x, lengths), [x.double() for x in xs], w)
    for a, b in zip(made, wide, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-6 * b.abs().max().item() + 1e-30)


@on_each
def test_packed_has_the_bits_of_single(impl: str) -> None:
    lengths = (70, 1, 0, 64, 20, 33)
    xs = inputs(lengths)
    assert_packed_is_single(lambda x, n: ours(x, n, impl), xs, weights(xs), lengths, BY_TOKEN)


@on_each
def test_bits_depend_on_no_run_and_no_number_of_threads(impl: str) -> None:
    lengths = (40, 90, 3)
    xs = inputs(lengths)
    w = weights(xs)
    assert_same_bits_on_threads(lambda: with_gradients(lambda x: ours(x, lengths, impl), xs, w))


@on_each
def test_bfloat16(impl: str) -> None:
    xs = inputs((40, 7), torch.bfloat16)
    assert_rounds_once(lambda x: ours(x, (40, 7), impl), xs, weights(xs))


@on_each
def test_rows_apart_padding_and_results_that_nobody_asks_for(impl: str) -> None:
    """Slices of a projection, NaN beside them and behind the last sequence; autocast; no states,
    D or bias; gradients that come by the final states alone; no tokens."""
    xs = inputs((9,))
    packed = packing((9,))
    packed.cu_seqlens[1] = 5
    for at in BY_TOKEN:
        xs[at] = torch.cat([xs[at], torch.full_like(xs[at], torch.nan)], 1)[:, : xs[at].shape[1]]
        if at != 1:  # steps are made of all tokens
            xs[at][5:] = torch.nan
    own = [x[:5].contiguous() if at in BY_TOKEN else x for at, x in enumerate(xs)]
    for at in (0, 1):

        def run(x: Tensors, *given: object) -> tuple[Tensor, Tensor]:
            result = ssd(*x[:5], None, None, *given, impl=impl)[at]  # noqa: B023
            assert result is not None
            return result, result.new_zeros(())

        w = [torch.ones(()), torch.ones(())]
        leaves = [x.detach().requires_grad_() for x in xs[:5]]
        with torch.autocast("cpu", torch.bfloat16):
            total = run(leaves, packed)[0].sum()
        made = torch.autograd.grad(total, leaves)
        _, _, *alone = with_gradients(lambda x: run(x), own[:5], w)
        for by_token, a, b in zip((1, 1, 0, 1, 1), made, alone, strict=True):
            assert_same_bits(a[:5] if by_token else a, b)
            assert not by_token or not a[5:].any()
    y, final = ssd(*own[:7], impl=impl, output_final_state=False)
    assert final is None
    assert_same_bits(y, ssd(*own[:7], None, torch.zeros_like(xs[7]), impl=impl)[0])
    none = inputs((0,))
    _, final, *grads = with_gradients(lambda x: ours(x, (0,), impl), none, weights(none))
    assert_same_bits(final, none[7])
    assert [x.shape for x in grads] == [x.shape for x in none]


def test_gradcheck_of_the_torch_form() -> None:
    lengths = (35, 0, 1)
    xs = [x.requires_grad_() for x in inputs(lengths, torch.float64)]
    torch.autograd.gradcheck(lambda *x: ours([*x], lengths, "torch"), xs, fast_mode=True)


def test_opcheck_with_gradients() -> None:
    x, dt, A, B, C, D, _, states = inputs((5, 34))
    given = (C, B, x, dt * A, dt, D, offsets((5, 34)).int(), states)
    torch.library.opcheck(
        torch.ops.torch_hybrid.ssd_forward.default,
        tuple(x.requires_grad_() if x.is_floating_point() else x for x in given),
        {"scale": 0.5, "output_final_state": True, "impl": "torch"},
    )
