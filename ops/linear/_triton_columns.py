"""Columns of the results of weights of x's own dtype."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_hybrid.ops.linear._triton_place import place, store_tile
from torch_hybrid.ops.triton.early import follow
from torch_hybrid.ops.triton.products import dot


@triton.jit
def store_columns(
    tile: tl.tensor,
    index_m: tl.tensor,
    x: tl.tensor,
    weights: tl.tuple,
    biases: tl.tuple,
    y: tl.tensor,
    sizes: tl.tuple,
    M: tl.tensor,
    stride_x: tl.tensor,
    stride_y: tl.tensor,
    BIASED: tl.constexpr,  # bit i: weight i has a bias
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Store a tile of BLOCK_N columns, of the rows ``index_m`` of y.

    Fewer than 16 rows are multiplied outside the tensor cores, as the weights come. Else the weight
    is the left operand of the tensor cores, 64 rows of it. With PARTS, each warp takes 16 rows and
    a part of the depth.
    """
    BLOCK_M: tl.constexpr = index_m.shape[0]
    FEW: tl.constexpr = BLOCK_M < 16
    weight, which, size, column, first_row = place(tile, weights, sizes, BLOCK_N)
    row = first_row + tl.arange(0, BLOCK_N)
    index_k = tl.arange(0, BLOCK_K)
    mask_n, mask_m = row < size, index_m < M
    p_w = weight + row.to(tl.int64)[:, None] * K + index_k[None, :]
    p_x = x + index_m.to(tl.int64)[:, None] * stride_x + index_k[None, :]
    follow(EARLY)
    if PARTS > 1:
        acc = _sum_in_parts(p_w, p_x, mask_n, mask_m, K, PARTS, STAGES)
    else:
        if FEW:
            acc = tl.zeros([BLOCK_N, BLOCK_M, BLOCK_K], dtype=tl.float32)
        else:
            acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            mask_k = first + index_k < K
            b_w = tl.load(p_w + first, mask=mask_n[:, None] & mask_k[None, :], other=0.0)
            b_x = tl.load(p_x + first, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
            if FEW:
                acc += b_w.to(tl.float32)[:, None, :] * b_x.to(tl.float32)[None, :, :]
            else:
                acc = dot(b_w, tl.trans(b_x), acc)
        if FEW:
            acc = tl.sum(acc, 2)
    store_tile(acc, y, biases, which, row, column, index_m, mask_n, mask_m, stride_y, BIASED)


@triton.jit
def _sum_in_parts(
    p_w: tl.tensor,
    p_x: tl.tensor,
    mask_n: tl.tensor,
    mask_m: tl.tensor,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Sum products of rows of a weight and of x [BLOCK_N, BLOCK_M], each warp a part of the depth.

    Tiles of pointers ``p_w`` and ``p_x`` are BLOCK_K columns wide.
    """
    BLOCK_K: tl.constexpr = p_w.shape[1]
    acc = tl.zeros([PARTS, p_w.shape[0], p_x.shape[0]], dtype=tl.float32)
    part = (tl.arange(0, PARTS) * BLOCK_K)[:, None, None]
    index_k = tl.arange(0, BLOCK_K)[None, None, :]
    for first in tl.range(0, K, PARTS * BLOCK_K, num_stages=STAGES):
        mask_k = first + part + index_k < K
        mask = mask_n[None, :, None] & mask_k
        b_w = tl.load(p_w[None, :, :] + (first + part), mask=mask, other=0.0)
        mask = mask_m[None, :, None] & mask_k
        b_x = tl.load(p_x[None, :, :] + (first + part), mask=mask, other=0.0)
        acc = dot(b_w, tl.permute(b_x, (0, 2, 1)), acc)
    return tl.sum(acc, 0)
