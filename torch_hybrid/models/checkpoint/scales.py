"""Unread weights with scales, in any format: rows that can be one tensor, and their scales."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.models.checkpoint import block_scales, packed_integers
from torch_hybrid.models.checkpoint.content import Content, leaves
from torch_hybrid.models.checkpoint.unread import Unread


def has_scales(weight: Tensor | None) -> bool:
    """Tell whether a part of a weight is stored with scales (FP8, INT8 or INT4)."""
    if not isinstance(weight, Unread):
        return False
    return any(part.stored.is_scaled for part in leaves(weight.content))


def _is_packed(content: Content) -> bool:
    return any(part.stored.packed is not None for part in leaves(content))


def stretches(weight: Unread) -> list[tuple[Unread, bool]]:
    """Divide a weight [N, K] into the fewest runs of rows that can each be one tensor.

    Returns:
        Each run, and whether it keeps its scales; other runs are floats, or are dequantized when
        they are read.
    """
    content = weight.content
    is_packed = _is_packed(content)
    parts = (packed_integers if is_packed else block_scales).stretches(content)
    found = []
    for part in parts:
        rows = Unread(part, weight.dtype, weight.device)
        keeps = packed_integers.kind_of(part) is not None if is_packed else has_scales(rows)
        found.append((rows, keeps))
    return found


def numbers_and_scales(weight: Tensor, *, num_parts: int = 1) -> tuple[Unread, Unread]:
    """Divide a weight [..., N, K] into its numbers and their scales, in the GEMMs' layout.

    Args:
        weight: an unread weight, all of it with scales of one kind.
        num_parts: number of equal parts of rows; FP8 blocks begin anew in each part.

    Raises:
        UnsupportedError: the weight is cut, or joined, within numbers that share a scale.
    """
    assert isinstance(weight, Unread)
    if _is_packed(weight.content):
        return packed_integers.numbers_and_scales(weight)
    return block_scales.numbers_and_scales(weight, num_parts=num_parts)
