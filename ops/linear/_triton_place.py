"""Start and end of every kernel: the choice of a program's weight, and the store of its tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(
    tile: tl.tensor, weights: tl.tuple, sizes: tl.tuple, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Find the weight of a tile of BLOCK_N rows.

    Returns:
        the weight, its number, its rows, the first of its columns in y, and the tile's first row.
    """
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
def scales_of(scales: tl.tuple, which: tl.tensor) -> tl.tensor:
    """Choose the scales of the program's weight."""
    scale = scales[0]
    for i in tl.static_range(1, len(scales)):
        scale = tl.where(which == i, scales[i], scale)
    return scale


@triton.jit
def store_tile(
    acc: tl.tensor,
    y: tl.tensor,
    biases: tl.tuple,
    which: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    index_m: tl.tensor,
    mask_n: tl.tensor,
    mask_m: tl.tensor,
    stride_y: tl.tensor,
    BIASED: tl.constexpr,
) -> None:
    """Add the bias of rows of the program's weight to sums [BLOCK_N, BLOCK_M], and store them."""
    acc += _bias_of(biases, which, row, mask_n, BIASED)[:, None]
    p_y = y + index_m.to(tl.int64)[None, :] * stride_y + (column + row)[:, None]
    tl.store(p_y, acc.to(y.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


@triton.jit
def _bias_of(
    biases: tl.tuple, which: tl.tensor, row: tl.tensor, mask: tl.tensor, BIASED: tl.constexpr
) -> tl.tensor:
    """Load the bias of these rows of the program's weight, 0 where it has none."""
    bias = tl.zeros([row.shape[0]], dtype=tl.float32)
    for i in tl.static_range(len(biases)):
        if BIASED & (1 << i):
            bias += tl.load(biases[i] + row, mask=mask & (which == i), other=0.0).to(tl.float32)
    return bias
