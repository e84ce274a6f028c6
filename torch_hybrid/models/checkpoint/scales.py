"""Unread weights that have scales, whatever their format, and the tensors that are kept of them."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.models.checkpoint import block_scales, packed_integers
from torch_hybrid.models.checkpoint import content as contents
from torch_hybrid.models.checkpoint.content import Content, leaves
from torch_hybrid.models.checkpoint.unread import Unread


def has_scales(weight: Tensor | None) -> bool:
    """Tell whether some of a weight is stored in FP8 or as integers, with scales."""
    return isinstance(weight, Unread) and contents.has_scales(weight.content)


def _is_packed(content: Content) -> bool:
    return any(part.stored.packed is not None for part in leaves(content))


def stretches(weight: Unread) -> list[tuple[Unread, bool]]:
    """Cut a weight [N, K] into the fewest runs of rows that can each be one tensor.

    Each run comes with True where it keeps its scales. The others are floats, or are dequantized
    as they are read."""
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
    """Divide a weight [..., N, K] into its numbers and their scales, for a GEMM.

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
