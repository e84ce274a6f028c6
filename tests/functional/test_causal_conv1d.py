"""The short convolution to train with: torch's own convolution in float64 is the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.functional.rules import Tensors, offsets, packing
from tests.ops.contract import assert_same_bits, assert_within_budget, skip_reason
from torch_hybrid.functional import causal_conv1d
from torch_hybrid.ops.causal_conv1d.training import causal_conv1d_backward
from torch_hybrid.ops.core.registration import REGISTERED

NAMES = ("y", "final_state", "dx", "dweight", "dbias", "dinitial_state")
LENGTHS = (5, 1, 0, 33, 2, 70)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def on_a_cpu() -> Iterator[object]:
    for name, each in REGISTERED["causal_conv1d_forward"].items():
        if "triton" not in name:
            why = skip_reason(each, "cpu")
            yield pytest.param(name, marks=pytest.mark.skipif(bool(why), reason=why or ""))


on_each = pytest.mark.parametrize("impl", [*on_a_cpu()])


def inputs(dtype: torch.dtype = torch.float32, width: int = 4) -> Tensors:
    T, C = sum(LENGTHS), 19
    shapes = (T, C), (C, width), (C,), (len(LENGTHS), width - 1, C)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def by_torch(xs: Tensors, activation: str | None) -> tuple[Tensor, Tensor]:
    x, weight, bias, states = xs
    out, final = [], []
    for state, (start, end) in zip(states, pairwise(offsets(LENGTHS).tolist()), strict=True):
        rows = torch.cat([state, x[start:end]])
        final.append(rows[end - start :])
        if end > start:
            out.append(F.conv1d(rows.T[None], weight[:, None], bias, groups=len(bias))[0].T)
    y = torch.cat(out)
    return F.silu(y) if activation else y, torch.stack(final)


def gradients(run, xs: Tensors, weights: Tensors) -> Tensors:
    leaves = [x.detach().clone().requires_grad_() for x in xs]
    results = run(leaves)
    total = sum((y * w.to(y.dtype)).sum() for y, w in zip(results, weights, strict=True))
    return [*(y.detach() for y in results), *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", [2, 4, 7])
@on_each
def test_gradients_within_twice_the_error_of_torch(
    impl: str, width: int, activation: str | None
) -> None:
    xs = inputs(width=width)
    w = [torch.randn_like(xs[0]), torch.randn_like(xs[3])]

    def run(x):
        return causal_conv1d(*x[:3], packing(LENGTHS), x[3], activation, impl=impl)

    ours = gradients(run, xs, w)
    exact = gradients(lambda x: by_torch(x, activation), [x.double() for x in xs], w)
    theirs = gradients(lambda x: by_torch(x, activation), xs, w)
    for name, a, b, c in zip(NAMES, ours, exact, theirs, strict=True):
        try:
            assert_within_budget(a, b, c)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@on_each
def test_packed_has_the_bits_of_single(impl: str) -> None:
    """Gradients of the filter, which all sequences share, are sums of theirs within rounding."""
    xs = inputs()
    w = [torch.randn_like(xs[0]), torch.randn_like(xs[3])]

    def run(x, packed):
        return causal_conv1d(*x[:3], packed, x[3], "silu", impl=impl)

    y, final, dx, dweight, dbias, dstates = gradients(lambda x: run(x, packing(LENGTHS)), xs, w)
    shared = torch.zeros_like(dweight), torch.zeros_like(dbias)
    for n, (start, end) in enumerate(pairwise(offsets(LENGTHS).tolist())):
        rows, seq = slice(start, end), slice(n, n + 1)
        own = [xs[0][rows], *xs[1:3], xs[3][seq]]
        alone = gradients(lambda x: run(x, None), own, [w[0][rows], w[1][seq]])
        for a, b in zip((0, 1, 2, 5), (y[rows], final[seq], dx[rows], dstates[seq]), strict=True):
            assert_same_bits(alone[a], b)
        for total, part in zip(shared, alone[3:5], strict=True):
            total += part
    torch.testing.assert_close(shared, (dweight, dbias), rtol=1e-5, atol=1e-5)


@on_each
def test_bfloat16_without_bias_or_states(impl: str) -> None:
    x, weight, *_ = inputs(torch.bfloat16)
    w = torch.randn(x.shape).bfloat16().float()

    def run(x, weight):
        x, weight = x.requires_grad_(), weight.requires_grad_()
        y, final = causal_conv1d(
            x, weight, None, packing(LENGTHS), impl=impl, output_final_state=False
        )
        assert final is None
        return [y.detach(), *torch.autograd.grad((y * w.to(y.dtype)).sum(), (x, weight))]

    for a, b in zip(run(x, weight), run(x.float(), weight.float()), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2**-7, atol=1e-5 * b.abs().max().item())


@on_each
def test_tokens_past_the_last_sequence_have_no_gradient(impl: str) -> None:
    """Rows lie apart; what stands in padding is read by nothing."""
    x, weight, bias, states = inputs()
    wide = torch.full((len(x) + 3, 2 * x.shape[1]), torch.nan)
    padded, dout = wide.split(x.shape[1], -1)
    padded[:-3], dout[:-3] = x, torch.randn_like(x)
    cu_seqlens = offsets(LENGTHS).int()

    def backward(x, dout):
        return causal_conv1d_backward(
            x, weight, bias, cu_seqlens, states, dout, states, activation="silu", impl=impl
        )

    dx, *others = backward(padded, dout)
    assert_same_bits(dx[-3:], torch.zeros(3, x.shape[1]))
    for a, b in zip((dx[:-3], *others), backward(x, dout[:-3].contiguous()), strict=True):
        torch.testing.assert_close(a, b)


def test_gradcheck_of_the_torch_form() -> None:
    xs = [x.requires_grad_() for x in inputs(torch.float64)]
    torch.autograd.gradcheck(
        lambda *x: causal_conv1d(*x[:3], packing(LENGTHS), x[3], "silu", impl="torch"),
        xs,
        fast_mode=True,
    )


def test_opcheck_with_gradients() -> None:
    x, weight, bias, states = (each.requires_grad_() for each in inputs())
    torch.library.opcheck(
        torch.ops.torch_hybrid.causal_conv1d_forward.default,
        (x, weight, bias, offsets(LENGTHS).int(), states),
        {"activation": "silu", "output_final_state": True, "impl": "torch"},
    )
