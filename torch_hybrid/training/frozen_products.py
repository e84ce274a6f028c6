"""Products with frozen quantized weights: inputs have gradients, weights do not.

A product dequantizes its weight, and so does its backward: nothing dequantized is kept. A compiler
that saw into these ops would dequantize once, and keep the result until the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_hybrid.ops.formats import block_scales
from torch_hybrid.ops.native.matrix_product import multiply


def dequantized(weight: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Dequantize a weight [..., N, K] in float32 or better, and round to ``dtype``.

    Args:
        weight: float8_e4m3fn with scales of blocks, or int8.
        scales: of FP8 see :mod:`block_scales`; of integers [..., N, G], one for each K / G numbers.
        zeros: zero points like scales of integers, or None.
        dtype: of the result.
    """
    if weight.dtype == block_scales.DTYPE:
        return block_scales.dequantized(weight, scales.float(), dtype)
    compute = torch.promote_types(dtype, torch.float32)
    groups = weight.to(compute).unflatten(-1, (scales.shape[-1], -1))
    if zeros is not None:
        groups = groups - zeros.to(compute)[..., None]
    worth: Tensor = (groups * scales.to(compute)[..., None]).flatten(-2).to(dtype)
    return worth


@torch.library.custom_op("torch_hybrid::frozen_product", mutates_args=())
def frozen_product(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, of_output: bool
) -> Tensor:
    """Multiply x [..., K] by weight [N, K], or if ``of_output`` x [..., N] by its transpose."""
    worth = dequantized(weight, scales, zeros, x.dtype)
    factor = worth if of_output else worth.T
    rows = x.reshape(-1, x.shape[-1])
    out = multiply(rows, factor, x.new_empty(len(rows), factor.shape[1]))
    return out.view(*x.shape[:-1], factor.shape[1])


@frozen_product.register_fake
def _empty_product(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, of_output: bool
) -> Tensor:
    """Make a tensor as the product is."""
    return x.new_empty(*x.shape[:-1], weight.shape[-1 if of_output else -2])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep the quantized weight."""
    ctx.save_for_backward(*inputs[1:4])
    ctx.of_output = inputs[4]


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    """Multiply by the other orientation of the weight, which is frozen."""
    return frozen_product(dout, *ctx.saved_tensors, not ctx.of_output), None, None, None, None


frozen_product.register_autograd(_backward, setup_context=_keep)
