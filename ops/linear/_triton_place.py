# mypy: disable-error-code="untyped-decorator"
"""Which weight of several a program multiplies, and what is added to its result."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(
    tile: tl.tensor, weights: tl.tuple, sizes: tl.tuple, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The weight of a tile of BLOCK_N rows, its number and rows, and where in y its columns begin;
    and the first of the tile's rows."""
    weight, size = weights[0], sizes[0]
    which, column, first_column, first_tile = 0, 0, 0, 0
    first_row = tile * BLOCK_N
    for i in tl.static_range(1, len(sizes)):
        first_tile += (sizes[i - 1] + BLOCK_N - 1) // BLOCK_N
        first_column += sizes[i - 1]
        is_here = tile >= first_tile
        weight = tl.where(is_here, weights[i], weight)
        size = tl.where(is_here, sizes[i], size)
        which = tl.where(is_here, i, which)
        column = tl.where(is_here, first_column, column)
        first_row = tl.where(is_here, (tile - first_tile) * BLOCK_N, first_row)
    return weight, which, size, column, first_row


@triton.jit
def bias_of(
    biases: tl.tuple, which: tl.tensor, row: tl.tensor, mask: tl.tensor, BIASED: tl.constexpr
) -> tl.tensor:
    """The bias of these rows of the program's weight, 0 where it has none."""
    bias = tl.zeros([row.shape[0]], dtype=tl.float32)
    for i in tl.static_range(len(biases)):
        if BIASED & (1 << i):
            bias += tl.load(biases[i] + row, mask=mask & (which == i), other=0.0).to(tl.float32)
    return bias
