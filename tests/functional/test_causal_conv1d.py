"""What is peculiar to the short convolution's backward: no bias, and rows that nobody asks for."""

from __future__ import annotations

import torch

from tests.functional.channels import CONVOLUTION
from tests.functional.recurrence import offsets, packing
from tests.functional.test_contract import on_each
from tests.ops.contract import assert_same_bits
from torch_hybrid.functional import causal_conv1d
from torch_hybrid.ops.causal_conv1d.training.op import causal_conv1d_backward

LENGTHS = CONVOLUTION.lengths["mixed"]
on_each_implementation = on_each({"conv": CONVOLUTION})


@on_each_implementation
def test_bfloat16_without_bias_or_states(of: object, impl: str) -> None:
    x, weight, *_ = CONVOLUTION.inputs(LENGTHS, torch.bfloat16)
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


@on_each_implementation
def test_tokens_past_the_last_sequence_have_no_gradient(of: object, impl: str) -> None:
    """Rows lie apart; what stands in padding is read by nothing."""
    x, weight, bias, states = CONVOLUTION.inputs(LENGTHS)
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
