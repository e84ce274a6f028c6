"""Weights in 8 and 4 bits with scales, as the ops take them: integers, and FP4."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.formats.integers import (
    FP4,
    INT4,
    INT8,
    MXFP4,
    in_4_bits,
    in_8_bits,
    in_fp4,
    num_scales,
    stored_depth,
)

# Numbers of a row that share a scale; a row of 8 bits has one.
FORMATS = {
    "int8": None,
    "int4_of_32": 32,
    "int4_of_64": 64,
    "int4_of_128": 128,
    "int4_64_zeros": 64,
    "mxfp4": 32,
    "nvfp4": 16,
}


def whole_groups(depth: int, name: str) -> int:
    """The next depth of whole groups; FP4 has pairs of those of 16."""
    group = MXFP4 if name.endswith("fp4") else FORMATS[name] or 1
    return -(-depth // group) * group


def in_integers(weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The numbers of a weight [..., N, K] and their scales."""
    group = FORMATS[name]
    if group is None:
        return in_8_bits(weight)
    if name.endswith("fp4"):
        return in_fp4(weight, group)
    return with_zeros(weight, group) if name.endswith("zeros") else in_4_bits(weight, group)


def without_data(shape: tuple[int, ...], name: str) -> tuple[Tensor, Tensor]:
    """Numbers of a weight [..., N, K] and scales on the meta device."""
    *rows, depth = shape
    group = FORMATS[name]
    dtype = FP4 if name.endswith("fp4") else INT8 if group is None else INT4
    pair = (2,) if name.endswith("zeros") else ()
    scales = rows if group is None else [*rows, num_scales(depth, group, dtype), *pair]
    bytes_or_floats = torch.uint8 if dtype == FP4 else torch.float32
    return (
        torch.empty([*rows, stored_depth(depth, dtype)], dtype=dtype, device="meta"),
        torch.empty(scales, dtype=bytes_or_floats, device="meta"),
    )


def not_finite(scales: Tensor, value: float) -> float:
    """The scale that is not finite: ``value`` of floats, and of FP4 bytes that are NaN."""
    return value if scales.is_floating_point() else 255


def with_zeros(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Numbers of 4 bits from the least of a group, 0, to the largest, 15; scales and zero points.

    The weight is moved first, so that these differ.
    """
    groups = (weight + 0.02).unflatten(-1, (weight.shape[-1] // group, group))
    least, largest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = (largest - least) / 15
    scales = torch.where(scales == 0, 1.0, scales)
    zeros = (-least / scales).round()
    stored = (groups / scales[..., None]).round() + zeros[..., None]
    stored = stored.clamp(0, 15).flatten(-2).to(torch.uint8)
    return stored[..., ::2] | stored[..., 1::2] << 4, torch.stack((scales, zeros), -1)
