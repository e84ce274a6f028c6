"""Selective scan to train with: values and gradients of every implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

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
from torch_hybrid.functional import selective_scan

# One token, borders of chunks of 8 and 32 and their neighbours, an empty sequence, a long one.
LENGTHS = {
    "short": (1, 2, 0, 17),
    "borders": (7, 8, 9, 31, 32, 33),
    "long": (300,),
    "mixed": (5, 100, 1, 0, 66),
}
NAMES = ["y", "final_state", "dx", "ddt", "dA", "dB", "dC", "dD", "dz", "ddt_bias", "dinitial"]
BY_TOKEN = (0, 1, 3, 4, 6)  # arguments with a row for each token
E, G, N = 140, 2, 12  # groups of more channels than a vector, and than a block

Inputs = Callable[[Sequence[int]], Tensors]

on_each = pytest.mark.parametrize("impl", [*on_a_cpu("selective_scan_backward")])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def inputs(lengths: Sequence[int], dtype: torch.dtype = torch.float32, groups: int = G) -> Tensors:
    """Make x, dt, A, B, C, D, z, dt_bias and initial states; rates from 1e-4 to 16."""
    T = sum(lengths)
    rows = [torch.randn(T, E), torch.randn(T, E), -torch.logspace(-4, 1.2, E * N).view(E, N)]
    rows += [torch.randn(T, groups, N) / 2 for _ in "BC"]
    own = [torch.randn(E), torch.randn(T, E), torch.randn(E) - 1]
    made = [*rows, *own, torch.randn(len(lengths), E, N)]
    work = torch.promote_types(dtype, torch.float32)
    return [x.to(dtype if at in BY_TOKEN else work) for at, x in enumerate(made)]


def from_zeros(lengths: Sequence[int]) -> Tensors:
    """Make inputs of one group, and states that are 0."""
    xs = inputs(lengths, groups=1)
    xs[8].zero_()
    return xs


def weights(xs: Tensors) -> Tensors:
    """Make random weights of outputs and final states."""
    return [torch.randn(xs[0].shape), torch.randn(xs[8].shape)]


def ours(xs: Tensors, lengths: Sequence[int] | None, impl: str) -> tuple[Tensor, Tensor]:
    packed = None if lengths is None else packing(lengths)
    y, final_state = selective_scan(*xs[:8], packed, xs[8], impl=impl)
    assert final_state is not None
    return y, final_state


def exact(xs: Tensors, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Walk token by token, in the dtype of the inputs."""
    x, dt, A, B, C, D, z, dt_bias, states = xs
    step = softplus(dt + dt_bias)
    B, C = (each.repeat_interleave(E // B.shape[1], 1) for each in (B, C))
    out, final = [x.new_empty(0, E)], []
    for S, (start, end) in zip(states, pairwise(offsets(lengths).tolist()), strict=True):
        for t in range(start, end):
            S = (step[t][:, None] * A).exp() * S + (step[t] * x[t])[:, None] * B[t]
            out.append((((S * C[t]).sum(1) + D * x[t]) * silu(z[t]))[None])
        final.append(S)
    return torch.cat(out), torch.stack(final)


def theirs(xs: Tensors, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Run transformers' scan, sequence by sequence: it has one group, and starts from zeros."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    _, _, A, _, _, D, _, dt_bias, states = xs
    out, final = [xs[0].new_empty(0, E)], []
    rows = zip(*(xs[at].split(list(lengths)) for at in BY_TOKEN), strict=True)
    for S, (x, dt, B, C, z) in zip(states, rows, strict=True):
        if len(x):
            y, S_end = mamba_selective_scan(
                *(x.mT[None], dt.mT[None], A, B[:, 0].mT[None], C[:, 0].mT[None]),
                D=D,
                z=z.mT[None],
                delta_bias=dt_bias,
                delta_softplus=True,
                return_last_state=True,
            )
            out.append(y[0].mT)
            S = S_end[0] + 0 * S
        final.append(S)
    return torch.cat(out), torch.stack(final)


def compare(
    impl: str,
    lengths: Sequence[int],
    other: Callable[..., tuple[Tensor, Tensor]],
    xs: Inputs,
    names: Sequence[str] = NAMES,
) -> None:
    """Compare with float64, beside another's float32, three draws as if they were one."""
    draws: list[list[Tensors]] = [[], [], []]
    for _ in range(3):
        drawn = xs(lengths)
        w, wide = weights(drawn), [x.double() for x in drawn]
        draws[0].append(with_gradients(lambda x: ours(x, lengths, impl), drawn, w))
        draws[1].append(with_gradients(lambda x: exact(x, lengths), wide, w))
        draws[2].append(with_gradients(lambda x: other(x, lengths), drawn, w))
    joined = ([torch.cat(each) for each in zip(*parts, strict=True)] for parts in draws)
    assert_all_within_budget(names, *(each[: len(names)] for each in joined))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@on_each
def test_gradients_within_twice_the_error_of_the_definition(
    impl: str, lengths: tuple[int, ...]
) -> None:
    compare(impl, lengths, exact, inputs)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@on_each
def test_gradients_within_twice_the_error_of_transformers(
    impl: str, lengths: tuple[int, ...]
) -> None:
    compare(impl, lengths, theirs, from_zeros, NAMES[:-1])  # no gradient of states


@pytest.mark.parametrize("A", [0.0, -200.0])
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
    D, gate or bias; gradients that come by the final states alone; no tokens."""
    xs = inputs((9,))
    packed = packing((9,))
    packed.cu_seqlens[1] = 5
    for at in BY_TOKEN:
        xs[at] = torch.cat([xs[at], torch.full_like(xs[at], torch.nan)], 1)[:, : xs[at].shape[1]]
        xs[at][5:] = torch.nan
    own = [x[:5].contiguous() if at in BY_TOKEN else x for at, x in enumerate(xs)]
    for at in (0, 1):

        def run(x: Tensors, *given: object) -> tuple[Tensor, Tensor]:
            result = selective_scan(*x[:5], None, None, None, *given, impl=impl)[at]  # noqa: B023
            assert result is not None
            return result, result.new_zeros(())

        leaves = [x.detach().requires_grad_() for x in xs[:5]]
        with torch.autocast("cpu", torch.bfloat16):
            total = run(leaves, packed)[0].sum()
        made = torch.autograd.grad(total, leaves)
        w = [torch.ones(()), torch.ones(())]
        _, _, *alone = with_gradients(lambda x: run(x), own[:5], w)
        for n, (a, b) in enumerate(zip(made, alone, strict=True)):
            assert_same_bits(a[:5] if n in BY_TOKEN else a, b)
            assert n not in BY_TOKEN or not a[5:].any()
    y, final = selective_scan(*own[:8], impl=impl, output_final_state=False)
    assert final is None
    assert_same_bits(y, selective_scan(*own[:8], None, torch.zeros_like(xs[8]), impl=impl)[0])
    none = inputs((0,))
    _, final, *grads = with_gradients(lambda x: ours(x, (0,), impl), none, weights(none))
    assert_same_bits(final, none[8])
    assert [x.shape for x in grads] == [x.shape for x in none]


def test_gradcheck_of_the_torch_form() -> None:
    lengths = (35, 0, 1)
    xs = [x.requires_grad_() for x in inputs(lengths, torch.float64)]
    torch.autograd.gradcheck(lambda *x: ours([*x], lengths, "torch"), xs, fast_mode=True)


def test_opcheck_with_gradients() -> None:
    xs = inputs((5, 34))
    given = (*xs[:8], offsets((5, 34)).int(), xs[8])
    torch.library.opcheck(
        torch.ops.torch_hybrid.selective_scan_forward.default,
        tuple(x.requires_grad_() if x.is_floating_point() else x for x in given),
        {"output_final_state": True, "impl": "torch"},
    )
