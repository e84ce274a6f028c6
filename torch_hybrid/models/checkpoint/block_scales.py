"""Unread FP8 weights, and the scales of the parts of them that a model keeps.

A stored weight [..., N, K] has a scale for each block: [..., ceil(N / 128), ceil(K / 128)]. The
strides of a part tell its place, and so the scales of its blocks. Adapters and ``shard`` know
nothing of scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.models.checkpoint.content import (
    Content,
    Joined,
    Slice,
    join,
    leaves,
    name_of,
    narrow,
)
from torch_hybrid.models.checkpoint.unread import Unread
from torch_hybrid.ops.formats.block_scales import BLOCK, DTYPE, num_blocks


def _is_scaled(part: Slice) -> bool:
    return part.stored.scales is not None


def stretches(content: Content) -> list[Content]:
    """Cut a weight [N, K] into the fewest runs of rows that can each be one tensor.

    A run has no scales, or is FP8 in whole blocks."""
    found: list[Content] = []
    for rows in _rows(content):
        if found and _follows(found[-1], rows):
            found[-1] = join([found[-1], rows], 0)
        else:
            found.append(rows)
    return found


def _rows(content: Content) -> list[Content]:
    if isinstance(content, Joined) and content.dim == 0:
        return [rows for part in content.parts for rows in _rows(part)]
    first = leaves(content)[0]
    return cut_at_block(content, 0, place_of(first)[0]) if _is_scaled(first) else [content]


def _follows(before: Content, rows: Content) -> bool:
    are_scaled = {_is_scaled(leaf) for leaf in leaves(before, rows)}
    return are_scaled == {False} or (are_scaled == {True} and before.shape[0] % BLOCK == 0)


def cut_at_block(content: Content, dim: int, start: int) -> list[Content]:
    """Cut off the rows or columns before the first block boundary inside a content.

    ``start`` is the place along the stored dim at which the content begins. A content that begins
    with a block, or ends within its first one, stays whole."""
    size, rest = content.shape[dim], -start % BLOCK
    if rest == 0 or rest >= size:
        return [content]
    return [narrow(content, dim, 0, rest), narrow(content, dim, rest, size - rest)]


def numbers_and_scales(weight: Tensor, *, num_parts: int = 1) -> tuple[Unread, Unread]:
    """Return the numbers of a weight [..., N, K] as they are stored, and the scales of their
    blocks.

    Args:
        weight: an unread weight that is stored in FP8 as a whole.
        num_parts: number of equal parts of rows; blocks begin anew in each part.

    Raises:
        UnsupportedError: the weight is cut, or joined, within blocks.
    """
    assert isinstance(weight, Unread)
    content, dim = weight.content, weight.ndim - 2
    size = content.shape[dim] // num_parts
    parts = [narrow(content, dim, i * size, size) for i in range(num_parts)]
    scales = join([_scales_of(part) for part in parts], dim)
    return (
        Unread(_bare(content), DTYPE, weight.device),
        Unread(scales, torch.float32, weight.device),
    )


def _bare(content: Content) -> Content:
    """Strip casts from stored numbers: a GEMM rounds the dequantized values itself."""
    if isinstance(content, Joined):
        return Joined(tuple(map(_bare, content.parts)), content.dim)
    _check_scaled(content)
    return Slice(stored=content.stored, where=content.where)


def _check_scaled(part: Slice) -> None:
    if not _is_scaled(part):
        raise UnsupportedError(
            f"{part.stored.name} is stored as {part.stored.dtype} beside weights of 8 bits that it "
            "is merged with"
        )
    if any(isinstance(step, Tensor) for step in part.steps):
        raise UnsupportedError(
            f"{part.stored.name} is stored in 8 bits, and multiplied by factors that its scales of "
            "blocks cannot take up"
        )


def _scales_of(content: Content) -> Content:
    if isinstance(content, Joined):
        before = content.parts[:-1]
        if content.dim >= len(content.shape) - 2 and any(
            part.shape[content.dim] % BLOCK for part in before
        ):
            raise UnsupportedError(
                f"{name_of(content)} is joined to other weights of 8 bits within a block of "
                f"{BLOCK} rows or columns"
            )
        return join([_scales_of(part) for part in content.parts], content.dim)
    _check_scaled(content)
    row, column = place_of(content)
    for start, size in zip((row, column), content.shape[-2:], strict=True):
        if 0 < -start % BLOCK < size:
            raise UnsupportedError(
                f"{content.stored.name} of 8 bits cannot be cut at {start} and {start + size}: its "
                f"scales are those of blocks of {BLOCK}"
            )
    return _blocks(content, row, column)


def _blocks(part: Slice, row: int, column: int) -> Content:
    """Select the scales of all blocks that a slice touches."""
    stored = part.stored
    scales = stored.scales
    assert scales is not None
    *_, num_rows, depth = stored.shape
    high, wide = num_blocks(num_rows), num_blocks(depth)
    *leading, rows, columns = part.shape
    first = part.where.storage_offset() // (num_rows * depth)
    shape = [*leading, num_blocks(rows), num_blocks(columns)]
    strides = [s // (num_rows * depth) * high * wide for s in part.where.stride()[:-2]]
    whole = Slice.whole(scales)
    where = whole.where.as_strided(
        shape,
        [*strides, wide, 1],
        first * high * wide + row // BLOCK * wide + column // BLOCK,
    )
    steps = () if scales.dtype == torch.float32 else (torch.float32,)
    return Slice(stored=scales, where=where, steps=steps)


def place_of(part: Slice) -> tuple[int, int]:
    """Return the stored row and column at which a slice [..., n, k] begins.

    Raises:
        UnsupportedError: its rows or columns are not consecutive stored ones.
    """
    *_, num_rows, depth = part.stored.shape
    strides = [*part.where.stride()]
    expected = [num_rows * depth] * (len(strides) - 2) + [depth, 1]
    for dim, (size, stride) in enumerate(zip(part.shape, strides, strict=True)):
        is_leading = dim < len(strides) - 2
        if size > 1 and (stride % expected[dim] if is_leading else stride != expected[dim]):
            raise UnsupportedError(
                f"{part.stored.name} has scales, and is taken in another order than these follow"
            )
    return divmod(int(part.where.storage_offset()) % (num_rows * depth), depth)


def blocks_of(part: Slice, place: Tensor) -> list[tuple[Slice, Content, Tensor]]:
    """Cut an FP8 slice into slices of whole blocks: each with its scales, and with its place in
    a tensor of the slice's shape."""
    found = []
    row, column = place_of(part)
    for rows, place_rows in _cut_both(part, place, -2, row):
        for piece, where in _cut_both(rows, place_rows, -1, column):
            assert isinstance(piece, Slice)
            found.append((piece, _scales_of(piece), where))
    return found


def _cut_both(
    content: Content, place: Tensor, dim: int, start: int
) -> Sequence[tuple[Content, Tensor]]:
    cut = cut_at_block(content, len(content.shape) + dim, start)
    sizes = [piece.shape[dim] for piece in cut]
    return list(zip(cut, place.split(sizes, dim), strict=True))
