"""Weights in 8 and 4 bits with scales, as the ops take them."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.integers import in_4_bits, in_8_bits

# Numbers of a row that share a scale; a row of 8 bits has one.
FORMATS = {"int8": None, "int4_of_32": 32, "int4_of_64": 64, "int4_of_128": 128}


def whole_groups(depth: int, name: str) -> int:
    """The next depth of whole groups."""
    group = FORMATS[name] or 1
    return -(-depth // group) * group


def in_integers(weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The numbers of a weight [..., N, K] and their scales."""
    group = FORMATS[name]
    return in_8_bits(weight) if group is None else in_4_bits(weight, group)
