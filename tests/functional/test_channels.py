"""Recurrences of single channels to train with: values and gradients of every implementation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.functional.channels import CHANNELS, Channels
from tests.functional.rules import (
    Tensors,
    assert_same_bits_on_threads,
    offsets,
    packing,
    with_gradients,
)
from tests.ops.contract import assert_same_bits, assert_within_budget, skip_reason
from torch_hybrid.ops.core.registration import REGISTERED

# One token, segments of 64 and their neighbours, an empty sequence, and long ones.
LENGTHS = {
    "short": (1, 2, 0, 17),
    "borders": (63, 64, 65, 128, 129),
    "long": (300,),
    "mixed": (5, 100, 1, 0, 128, 66),
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def on_a_cpu() -> Iterator[object]:
    for op in CHANNELS:
        for name, each in REGISTERED[f"{op}_backward"].items():
            if "cpu" in each.capability.devices:
                why = skip_reason(each, "cpu")
                marks = pytest.mark.skipif(bool(why), reason=why or "")
                yield pytest.param(CHANNELS[op], name, marks=marks, id=f"{op}-{name}")


on_each = pytest.mark.parametrize(("op", "impl"), [*on_a_cpu()])
of_each = pytest.mark.parametrize("op", CHANNELS.values(), ids=CHANNELS)
starts = pytest.mark.parametrize("has_states", [True, False], ids=["from states", "from nothing"])


def ours(
    op: Channels, xs: Tensors, lengths: Sequence[int] | None, impl: str, *, has_states: bool = True
) -> tuple[Tensor, Tensor]:
    packed = None if lengths is None else packing(lengths)
    o, final = op.function(*xs[:-1], packed, xs[-1] if has_states else None, impl=impl)
    assert final is not None
    # So that every input has a gradient, and empty sequences have the same last state in all.
    if not has_states:
        is_empty = torch.tensor([n == 0 for n in lengths or (1,)])
        final = torch.where(is_empty.view(-1, *[1] * (final.ndim - 1)), xs[-1], final)
    return o, final


def weights(xs: Tensors) -> Tensors:
    """Make random weights of outputs and final states."""
    return [torch.randn(xs[0].shape), torch.randn(xs[-1].shape)]


@starts
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@on_each
def test_gradients_within_twice_the_error_of_transformers(
    op: Channels, impl: str, lengths: tuple[int, ...], has_states: bool
) -> None:
    xs = op.inputs(lengths)
    w = weights(xs)
    if not has_states:  # each state has a gradient of 0 then
        xs[-1].zero_()
    made = with_gradients(lambda x: ours(op, x, lengths, impl, has_states=has_states), xs, w)

    def walked(walk: object, x: Tensors) -> tuple[Tensor, Tensor]:
        out, final = op.by_sequence(walk, x, lengths, has_states=has_states)
        return out, final + 0 * x[-1]

    wide = with_gradients(lambda x: walked(op.exact, x), [x.double() for x in xs], w)
    other = with_gradients(lambda x: walked(op.theirs, x), xs, w)
    names = ["out", "final_state", *(f"d{name}" for name in op.names)]
    for name, a, b, c in zip(names, made, wide, other, strict=True):
        try:
            assert_within_budget(a, b, c)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("which", [0, 1])
@on_each
def test_extreme_decays(op: Channels, impl: str, which: int) -> None:
    lengths = (70, 3)
    xs = op.inputs(lengths)
    xs[2].fill_(op.extremes[which])
    w = weights(xs)
    made = with_gradients(lambda x: ours(op, x, lengths, impl), xs, w)
    wide = with_gradients(
        lambda x: op.by_sequence(op.exact, x, lengths, has_states=True), [x.double() for x in xs], w
    )
    for a, b in zip(made, wide, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=5e-6 * b.abs().max().item() + 1e-30)


@starts
@on_each
def test_packed_has_the_bits_of_single(op: Channels, impl: str, has_states: bool) -> None:
    """Gradients of what all sequences share are sums of theirs within rounding."""
    lengths = (70, 1, 0, 64, 20, 133)
    xs, rows = op.inputs(lengths), op.num_rows
    w = weights(xs)
    o, final, *grads = with_gradients(
        lambda x: ours(op, x, lengths, impl, has_states=has_states), xs, w
    )
    shared = [torch.zeros_like(x) for x in xs]
    for n, (start, end) in enumerate(pairwise(offsets(lengths).tolist())):
        parts = [slice(start, end)] * rows + [slice(None)] * (len(xs) - rows - 1)
        own = [x[part] for x, part in zip(xs, [*parts, slice(n, n + 1)], strict=True)]
        alone = with_gradients(
            lambda x: ours(op, x, None if len(x[0]) else (0,), impl, has_states=has_states),
            own,
            [w[0][start:end], w[1][n : n + 1]],
        )
        assert_same_bits(alone[0], o[start:end])
        assert_same_bits(alone[1], final[n : n + 1])
        for at, grad in enumerate(alone[2:]):
            if at < rows or at == len(xs) - 1:
                assert_same_bits(grad, grads[at][start:end] if at < rows else grads[at][n : n + 1])
            else:
                shared[at] += grad
    for at in range(rows, len(xs) - 1):
        atol = 1e-5 * grads[at].abs().max().item()
        torch.testing.assert_close(shared[at], grads[at], rtol=1e-5, atol=atol)


@on_each
def test_bits_depend_on_no_run_and_no_number_of_threads(op: Channels, impl: str) -> None:
    lengths = (40, 90, 3)
    xs = op.inputs(lengths)
    w = weights(xs)
    assert_same_bits_on_threads(lambda: with_gradients(lambda x: ours(op, x, lengths, impl), xs, w))


@on_each
def test_bfloat16(op: Channels, impl: str) -> None:
    """Within one rounding of results from float32 arithmetic on the rounded inputs."""
    lengths = (40, 7)
    xs = op.inputs(lengths, torch.bfloat16)
    w = [x.bfloat16().float() for x in weights(xs)]
    made, wide = (
        with_gradients(lambda x: ours(op, x, lengths, impl), each, w)
        for each in (xs, [x.float() for x in xs])
    )
    for a, b in zip(made, wide, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2**-7, atol=1e-5 * b.abs().max().item())


@on_each
def test_rows_apart_padding_and_results_that_nobody_asks_for(op: Channels, impl: str) -> None:
    """Slices of a projection, NaN beside them and behind the last sequence; autocast; no states;
    gradients that come by the final states alone; no tokens."""
    xs = op.inputs((9,))
    packed = packing((9,))
    packed.cu_seqlens[1] = 5
    for at in range(op.num_rows):
        xs[at] = torch.cat([xs[at], torch.full_like(xs[at], torch.nan)], -1)[
            ..., : xs[at].shape[-1]
        ]
        xs[at][5:] = torch.nan
    own = [x[:5].contiguous() if at < op.num_rows else x for at, x in enumerate(xs)]
    for at in (0, 1):

        def run(x: Tensors, *given: object) -> Tensor:
            result = op.function(*x[:-1], *given, impl=impl)[at]  # noqa: B023
            assert result is not None
            return result.sum()

        leaves = [x.detach().requires_grad_() for x in xs]
        with torch.autocast("cpu", torch.bfloat16):
            made = torch.autograd.grad(run(leaves, packed), leaves[:-1])
        leaves = [x.detach().requires_grad_() for x in own]
        alone = torch.autograd.grad(run(leaves), leaves[:-1])
        for place, (a, b) in enumerate(zip(made, alone, strict=True)):
            by_token = place < op.num_rows
            assert_same_bits(a[:5] if by_token else a, b)
            assert not by_token or not a[5:].any()
    o, final = op.function(*own[:-1], impl=impl, output_final_state=False)
    assert final is None
    assert_same_bits(o, op.function(*own[:-1], impl=impl)[0])
    none = op.inputs((0,))
    _, final, *grads = with_gradients(lambda x: ours(op, x, (0,), impl), none, weights(none))
    assert_same_bits(final, none[-1])
    assert [x.shape for x in grads] == [x.shape for x in none]


@starts
@of_each
def test_gradcheck_of_the_torch_form(op: Channels, has_states: bool) -> None:
    lengths = (35, 0, 1)
    xs = [x.requires_grad_() for x in op.inputs(lengths, torch.float64)]
    torch.autograd.gradcheck(
        lambda *x: ours(op, [*x], lengths, "torch", has_states=has_states), xs, fast_mode=True
    )


@of_each
def test_opcheck_with_gradients(op: Channels) -> None:
    lengths = (5, 34)
    *given, states = op.inputs(lengths)
    torch.library.opcheck(
        op.forward,
        tuple(
            x.requires_grad_() if x.is_floating_point() else x
            for x in (*given, offsets(lengths).int(), states)
        ),
        {"output_final_state": True, "impl": "torch"},
    )
