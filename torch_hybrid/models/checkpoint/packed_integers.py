"""Unread INT4, INT8 and FP4 weights: the stored layouts of numbers, scales and zero points.

A weight [N, K] has INT4 numbers, eight of them in an int32 word, or INT8 ones. INT4, and INT8 in
words, are stored unsigned: 8 or 128 more than their values. ``ops/formats/integers.py`` has the
layout that GEMMs take. The stored layouts, with G groups of a row:

                numbers           scales    zero points       made by
    rows        [N, K / 8]        [N, G]    [N / 8, G]        compressed-tensors, pack-quantized
    columns     [K / 8, N]        [G, N]    [G, N / 8]        GPTQ
    columns_v1  the same, and zero points are stored as one less
    awq         [K, N / 8]        [G, N]    [G, N / 8]        AWQ; eight in an order of its own
    fp4         [N, K / 8]        [N, G]    -                 compressed-tensors, mxfp4- and nvfp4-

FP4's scales are bytes. NVFP4 has a divisor of all scales, in the place of zero points.

A word of eight numbers along K, the first in the lowest bits, is four bytes of the GEMMs' layout.
The reader copies or transposes such words. It transposes the others in blocks of 8 x 8 numbers.

    as stored                        as it is read                    what becomes of a block
    [K / 8, 8, N / 8] (awq)          [N / 8, 8, K / 8]                transposed
    zero points [N / 8, G]           [N / 8, 8, G], 8 times the same  one of eight each

Adapters and ``shard`` see a weight [N, K] of floats. The strides of the parts that they keep tell
which numbers, scales and zero points to read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.models.checkpoint.block_scales import place_of
from torch_hybrid.models.checkpoint.content import (
    Content,
    Joined,
    Packed,
    Slice,
    Step,
    Stored,
    join,
    leaves,
    narrow,
)
from torch_hybrid.models.checkpoint.unread import Unread
from torch_hybrid.ops.formats.integers import (
    FACTOR_BYTES,
    FP4,
    GROUPS,
    INT4,
    INT8,
    MXFP4,
    num_scales,
)

IN_WORD = 8  # INT4 numbers in an int32
_BY_ROWS = ("rows", "fp4")  # layouts that are not transposed
_IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
# The number of a word, from the lowest bits on, that belongs to each of eight rows.
_ORDERS = {"awq": (0, 4, 1, 5, 2, 6, 3, 7)}
_BIAS = {"columns_v1": 1}


def group_of(stored: Stored) -> int:
    """Choose the group size of a stored weight: numbers of a row that share a scale; 0 for INT8.

    A row with a single stored scale is divided into groups that repeat it.
    """
    packed = stored.packed
    assert packed is not None
    depth = stored.shape[1]
    if packed.bits == 8:
        return 0
    num_groups = _scales(packed).shape[1]
    sizes = GROUPS if num_groups == 1 else (depth // num_groups,)
    return next((group for group in reversed(sizes) if depth % group == 0), 0)


def _scales(packed: Packed) -> Tensor:
    """Make a meta view [N, G] of the stored scales."""
    where = Slice.whole(packed.scales).where
    return where if packed.layout in _BY_ROWS else where.T


def _has_whole_rows(part: Slice) -> bool:
    """Tell whether a slice cuts no word: some layouts pack numbers of 8 rows into one."""
    packed = part.stored.packed
    assert packed is not None
    row, _ = place_of(part)
    return not _is_blocked(packed) or row % IN_WORD == part.shape[-2] % IN_WORD == 0


def _is_blocked(packed: Packed) -> bool:
    return packed.layout == "awq" or (packed.zeros is not None and packed.layout != "fp4")


def _unit(stored: Stored) -> int:
    """Choose how many columns are kept together; 0 for INT8."""
    assert stored.packed is not None
    return MXFP4 if stored.packed.layout == "fp4" else group_of(stored)


def kind_of(content: Content) -> tuple[object, ...] | None:
    """Describe the format of a content; rows with equal formats can be one tensor.

    None stands for floats, and for integers that are cut within words: these become floats.
    """
    part = leaves(content)[0]
    packed = part.stored.packed
    if packed is None or not all(map(_has_whole_rows, leaves(content))):
        return None
    return packed.bits, packed.layout, group_of(part.stored), packed.zeros is None


def stretches(content: Content) -> list[Content]:
    """Divide a weight [N, K] into the fewest runs of rows that can each be one tensor."""
    parts = content.parts if isinstance(content, Joined) and content.dim == 0 else (content,)
    found: list[Content] = []
    for rows in parts:
        if found and kind_of(found[-1]) == kind_of(rows):
            found[-1] = join([found[-1], rows], 0)
        else:
            found.append(rows)
    return found


def numbers_and_scales(weight: Unread) -> tuple[Unread, Unread]:
    """Divide a weight [..., N, K] into its numbers and their scales, in the GEMMs' layout.

    Raises:
        UnsupportedError: the weight is cut within groups, or joined to one of another format.
    """
    parts = leaves(weight.content)
    kinds = {kind_of(part) for part in parts}
    first = parts[0].stored
    if None in kinds or len(kinds) > 1:
        raise UnsupportedError(
            f"{first.name} is merged with weights that are stored otherwise, or cut within "
            f"{IN_WORD} rows that share a word"
        )
    assert first.packed is not None
    *leading, depth = weight.shape
    numbers = _mapped(weight.content, _numbers, first.packed.layout == "awq")
    if first.packed.layout == "fp4":
        scales = _mapped(weight.content, _fp4_scales_of, False)
        shape = [*leading, num_scales(depth, group_of(first), FP4)]
        return (
            Unread(numbers, FP4, weight.device, shape=[*leading, depth // IN_WORD]),
            Unread(scales, torch.uint8, weight.device, shape=shape),
        )
    scales = _mapped(weight.content, _scales_of, first.packed.zeros is not None)
    if first.packed.bits == 8:
        shape = [*leading, depth]
        return (
            Unread(numbers, INT8, weight.device, shape=shape),
            Unread(scales, torch.float32, weight.device, shape=leading),
        )
    shape = [*leading, depth // group_of(first)]
    return (
        Unread(numbers, INT4, weight.device, shape=[*leading, depth // 2], unit=torch.int32),
        Unread(
            scales,
            torch.float32,
            weight.device,
            shape=shape if first.packed.zeros is None else [*shape, 2],
        ),
    )


def _mapped(content: Content, part_of: Callable[[Slice], Content], is_blocked: bool) -> Content:
    """Map each slice of a content and join the results alike; blocked rows have two dims."""
    if isinstance(content, Slice):
        return part_of(content)
    is_last = content.dim == len(content.shape) - 1
    if is_last and part_of is _fp4_scales_of:  # each part has a factor behind its scales
        raise UnsupportedError(
            f"{leaves(content)[0].stored.name} of FP4 is merged with others along its columns"
        )
    parts = [_mapped(part, part_of, is_blocked) for part in content.parts]
    return join(parts, content.dim + (is_blocked and is_last))


def _numbers(part: Slice) -> Content:
    packed = part.stored.packed
    assert packed is not None
    _check_not_multiplied(part)
    (row, column), (rows, columns) = place_of(part), part.shape[-2:]
    stored = packed.numbers
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()
    if packed.bits == 8:
        steps = () if stored.dtype == INT8 else (_less_128,)
        where = Slice.whole(stored).where.narrow(0, row, rows).narrow(1, column, columns)
        return Slice(stored=stored, where=_with_leading(where, part), steps=steps)
    where = Slice.whole(stored).where
    if packed.layout == "awq":
        where = where.unflatten(0, (-1, IN_WORD)).permute(2, 1, 0)
        row, rows = row // IN_WORD, rows // IN_WORD
        steps = (_transposed_blocks,)
    elif packed.layout not in _BY_ROWS:
        where = where.T
    where = where.narrow(0, row, rows)
    where = where.narrow(-1, column // IN_WORD, columns // IN_WORD)
    return Slice(stored=stored, where=_with_leading(where, part), steps=steps)


def _scales_of(part: Slice) -> Content:
    packed = part.stored.packed
    assert packed is not None
    (row, column), (rows, columns) = place_of(part), part.shape[-2:]
    first, count = 0, 1
    where = _scales(packed)
    if group := group_of(part.stored):
        _check_cut(part)
        first, count = column // group, columns // group
        where = where.expand(-1, part.stored.shape[1] // group)
    where = where.narrow(0, row, rows).narrow(1, first, count)
    steps: tuple[Step, ...] = (torch.float32,)
    if packed.zeros is None:
        return Slice(stored=packed.scales, where=_with_leading(where, part), steps=steps)
    where = where.unflatten(0, (-1, IN_WORD))[..., None]
    scales = Slice(stored=packed.scales, where=_with_leading(where, part), steps=steps)
    where = Slice.whole(packed.zeros).where
    where = where if packed.layout == "rows" else where.T
    where = where.narrow(0, row // IN_WORD, rows // IN_WORD)[:, None, :, None]
    where = where.expand(-1, IN_WORD, part.stored.shape[1] // group, -1).narrow(2, first, count)
    zeros = Slice(
        stored=packed.zeros,
        where=_with_leading(where, part),
        steps=(partial(_one_of_eight, packed.layout),),
    )
    return join([scales, zeros], zeros.where.ndim - 1)


def _check_cut(part: Slice) -> None:
    """Raise UnsupportedError where columns are cut within groups."""
    column, columns, unit = place_of(part)[1], part.shape[-1], _unit(part.stored)
    if column % unit or columns % unit:
        raise UnsupportedError(
            f"{part.stored.name} of 4 bits cannot be cut at {column} and {column + columns}: "
            f"its scales are those of groups of {unit}"
        )


def _fp4_scales_of(part: Slice) -> Content:
    packed, block = part.stored.packed, group_of(part.stored)
    assert packed is not None
    _check_cut(part)
    (row, column), (rows, columns) = place_of(part), part.shape[-2:]
    where = _scales(packed).narrow(0, row, rows).narrow(1, column // block, columns // block)
    steps: tuple[Step, ...] = (partial(_fp4_bytes, packed.scales.name),)
    scales = Slice(stored=packed.scales, where=_with_leading(where, part), steps=steps)
    if packed.zeros is None:
        return scales
    where = Slice.whole(packed.zeros).where.expand(rows, FACTOR_BYTES)
    steps = (partial(_factor_bytes, packed.zeros.name),)
    factor = Slice(stored=packed.zeros, where=_with_leading(where, part), steps=steps)
    return join([scales, factor], factor.where.ndim - 1)


def _fp4_bytes(name: str, scales: Tensor) -> Tensor:
    """View scales as bytes; raise ValueError where some are NaN."""
    stored = scales.view(torch.uint8)
    is_nan = stored == 255 if scales.dtype == torch.uint8 else (stored & 127) == 127
    if count := int(is_nan.sum()):
        raise ValueError(f"weight {name} has {count} NaN or infinite values")
    return stored


def _factor_bytes(name: str, divisors: Tensor) -> Tensor:
    """Make factors [..., 4] of bytes of as many equal divisors."""
    factors = 1 / divisors[..., :1]
    if not bool(((factors > 0) & factors.isfinite()).all()):
        raise ValueError(f"{name} must be positive and finite, got {divisors.flatten()[0]:g}")
    return factors.contiguous().view(torch.uint8)


def _with_leading(where: Tensor, part: Slice) -> Tensor:
    """Add the leading dims of a slice, all of size 1."""
    leading = part.shape[:-2]
    assert leading.numel() == 1
    return where[(None,) * len(leading)]


def _check_not_multiplied(part: Slice) -> None:
    if any(isinstance(step, Tensor) for step in part.steps):
        raise UnsupportedError(
            f"{part.stored.name} is stored as integers, and multiplied by factors that its scales "
            "of groups cannot take up"
        )


def _less_128(stored: Tensor) -> Tensor:
    """Convert UINT8 numbers, stored as 128 more than their values, to INT8."""
    return (stored ^ 128).view(INT8)


def _transposed_blocks(words: Tensor) -> Tensor:
    """Transpose blocks of AWQ words [..., N / 8, 8, K / 8]: from eight rows to eight columns each.

    It is the recursive transposition of an 8 x 8 matrix: it swaps off-diagonal blocks of 4 x 4
    numbers, then of 2 x 2, then of 1 x 1.
    """
    assert words.shape[-2] == IN_WORD
    words = words.clone(memory_format=torch.contiguous_format)
    for width, kept in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        low, high = words.unflatten(-2, (-1, 2, width)).unbind(-3)
        change = ((low >> 4 * width) ^ high) & kept
        high ^= change
        low ^= change << 4 * width
    order = torch.tensor(_ORDERS["awq"], dtype=torch.int64, device=words.device)
    return words.index_select(-2, order)


def _one_of_eight(layout: str, words: Tensor) -> Tensor:
    """Unpack zero points: of [..., 8, G, 1] equal words, row i takes its own number."""
    order = _ORDERS.get(layout, _IN_ORDER)
    shifts = 4 * torch.tensor(order, dtype=torch.int64, device=words.device)
    stored = words >> shifts.to(torch.int32)[:, None, None]
    return ((stored + _BIAS.get(layout, 0)) & 15).float()


def enclosing(part: Slice) -> tuple[Slice, tuple[slice, slice]]:
    """Extend a slice [..., n, k] to whole groups and words of its stored weight.

    Returns:
        The smallest such slice, of two dims, and the rows and columns of the given one in it.
    """
    packed = part.stored.packed
    assert packed is not None
    _check_not_multiplied(part)
    (row, column), (rows, columns) = place_of(part), part.shape[-2:]
    first_row, num_rows = _whole(row, rows, IN_WORD if _is_blocked(packed) else 1)
    first_column, num_columns = _whole(column, columns, _unit(part.stored) or 1)
    whole = Slice.whole(part.stored)
    outer = narrow(narrow(whole, 0, first_row, num_rows), 1, first_column, num_columns)
    assert isinstance(outer, Slice)
    row, column = row - first_row, column - first_column
    return outer, (slice(row, row + rows), slice(column, column + columns))


def _whole(start: int, size: int, unit: int) -> tuple[int, int]:
    first = start // unit * unit
    return first, -(-(start + size - first) // unit) * unit
