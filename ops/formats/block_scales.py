"""FP8 weights: each is its number times the scale of its block of 128 x 128.

The layout of checkpoints with ``quant_method: fp8``: numbers are float8_e4m3fn, and a block's
scale, there called ``weight_scale_inv``, is float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_hybrid.ops.core.registration import check_contiguous, check_dtypes, check_shapes

BLOCK = 128
DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # of the numbers
# What a caller needs of an implementation that takes such weights.
FEATURE = "fp8_weights"
# Smaller numbers than this beside no larger ones are rounded to 0.
_LEAST = 1e-12


def num_blocks(size: int) -> int:
    """Count the blocks along a dimension; the last may be smaller."""
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
    """Dequantize a weight in float32 or better, and round to ``dtype``.

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


def rounded(x: Tensor) -> Tensor:
    """Round x [..., K] to FP8 and back to float32, as "triton_fp8" does.

    The 128 numbers of a row that meet one block of a weight share a scale. It makes the largest of
    them 448.
    """
    depth = x.shape[-1]
    blocks = F.pad(x.float(), (0, -depth % BLOCK)).unflatten(-1, (num_blocks(depth), BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=_LEAST)
    top = torch.full_like(largest, LARGEST)  # a number would be multiplied by an inverse
    numbers = (blocks * (top / largest)).to(DTYPE).float()
    left: Tensor = (numbers * (largest / top)).flatten(-2)[..., :depth]
    return left
