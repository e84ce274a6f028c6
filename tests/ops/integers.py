"""Weights in 8 and 4 bits with scales, as the ops take them."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.formats.integers import in_4_bits, in_8_bits

# Numbers of a row that share a scale; a row of 8 bits has one.
FORMATS = {
    "int8": None,
    "int4_of_32": 32,
    "int4_of_64": 64,
    "int4_of_128": 128,
    "int4_64_zeros": 64,
}


def whole_groups(depth: int, name: str) -> int:
    """The next depth of whole groups."""
    group = FORMATS[name] or 1
    return -(-depth // group) * group


def in_integers(weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The numbers of a weight [..., N, K] and their scales."""
    group = FORMATS[name]
    if group is None:
        return in_8_bits(weight)
    return with_zeros(weight, group) if name.endswith("zeros") else in_4_bits(weight, group)


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
