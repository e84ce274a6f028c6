"""Weights of 8 bits, each worth its number times the scale of its block of 128 x 128.

The layout of checkpoints with ``quant_method: fp8``: numbers are float8_e4m3fn, and a block's
scale, there called ``weight_scale_inv``, is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.registration import check_contiguous, check_dtypes, check_shapes

BLOCK = 128
DTYPE = torch.float8_e4m3fn
# What a caller needs of an implementation that takes such weights.
FEATURE = "fp8_weights"


def num_blocks(size: int) -> int:
    """Blocks along a dimension; the last may be smaller."""
    return -(-size // BLOCK)


def check_scales(weight: Tensor, scales: Tensor, name: str, *, num_parts: int = 1) -> None:
    """Raise ValueError, about ``name``, unless scales are as :func:`dequantized` takes them."""
    *leading, num_rows, depth = weight.shape
    shape = (*leading, num_parts * num_blocks(num_rows // num_parts), num_blocks(depth))
    check_shapes({name: (scales, shape)})
    check_dtypes({name: (scales, torch.float32)})
    check_contiguous(**{name: scales})


def dequantized(
    weight: Tensor, scales: Tensor, dtype: torch.dtype, *, num_parts: int = 1
) -> Tensor:
    """What a weight is worth, computed in float32 or better and rounded to ``dtype``.

    Args:
        weight: [..., N, K] float8_e4m3fn.
        scales: [..., num_parts * ceil(N / num_parts / 128), ceil(K / 128)] float32.
        dtype: of the result.
        num_parts: parts of rows that have blocks each for itself, as gate and up have.
    """
    compute = torch.promote_types(dtype, torch.float32)
    parts = weight.to(compute).unflatten(-2, (num_parts, -1))
    *_, num_rows, depth = parts.shape
    by_element = scales.to(compute).unflatten(-2, (num_parts, -1))
    by_element = by_element.repeat_interleave(BLOCK, -2)[..., :num_rows, :]
    by_element = by_element.repeat_interleave(BLOCK, -1)[..., :depth]
    worth: Tensor = (parts * by_element).flatten(-3, -2).to(dtype)
    return worth
