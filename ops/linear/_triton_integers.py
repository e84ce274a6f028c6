# mypy: disable-error-code="untyped-decorator"
"""Weights that are integers in Triton: widened in registers, so that x is not rounded.

Of many rows, weights are widened in memory once, and torch multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.formats.integers import INT4, group_of, has_zeros
from torch_hybrid.ops.linear._triton_place import bias_of, place
from torch_hybrid.ops.linear.by_torch import empty_columns, product_by_torch
from torch_hybrid.ops.triton.integers import (
    chunk_of,
    few_products,
    rows_at,
    scale_and_zero,
    wide_tile,
)
from torch_hybrid.ops.triton.products import dot

# Past it a weight is read so often that widening it in memory is the faster way.
MAX_ROWS = 64
_WIDE_ROWS, _WIDE_COLUMNS = 32, 128  # of a tile that is widened in memory

# Of few columns there are few programs: the warps of one share the depth, and 16 columns are enough
# for it. Numbers of 4 bits take so long to widen that they are better shared whatever the columns.
_FEW_COLUMNS = 4096
_PART_ROWS = 32  # that a program multiplies so at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows of x and of a weight that a program multiplies, ``block_k`` columns at a time in each of
    ``num_parts`` parts side by side. Decided by shapes alone."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_parts: int = 1
    num_warps: int = 4

    @classmethod
    def of(cls, num_rows: int, num_columns: int, depth: int, *, is_int4: bool) -> Tile:
        """For that many rows of x, and columns of all weights' results, of sums so deep."""
        few_columns = num_columns <= _FEW_COLUMNS
        if num_rows == 1:  # outside the tensor cores
            if is_int4 and not few_columns:
                return cls(block_m=1, block_n=16, block_k=256, num_stages=1, num_warps=8)
            return cls(block_m=1, block_n=4, block_k=512, num_stages=1)
        block_m = max(16, triton.next_power_of_2(num_rows))
        if (few_columns or (is_int4 and num_rows <= 16)) and depth % 512 == 0:
            block_m = min(block_m, _PART_ROWS)
            return cls(block_m=block_m, block_n=16, block_k=128, num_stages=3, num_parts=4)
        block_n = 32 if num_rows <= 16 and not is_int4 else 64
        return cls(block_m=block_m, block_n=block_n, block_k=128, num_stages=3)


def integer_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scales: Sequence[Tensor],
) -> Tensor:
    """What ``linear`` returns of weights that are integers."""
    num_rows, depth = x.shape
    sizes = tuple(weight.shape[0] for weight in weights)
    y = empty_columns(x, sizes)
    pairs = list(zip(weights, scales, strict=True))
    kinds = {(group_of(*pair), has_zeros(*pair)) for pair in pairs}
    if not _is_ours(x, sizes) or len(kinds) > 1:
        widened = _in_memory(weights, scales, x.dtype)
        return product_by_torch(x, widened, biases, y)
    is_int4 = weights[0].dtype == INT4
    group, zeros = kinds.pop()
    tile = Tile.of(num_rows, sum(sizes), depth, is_int4=is_int4)
    columns = sum(triton.cdiv(size, tile.block_n) for size in sizes)
    _integer_linear_kernel[(columns, triton.cdiv(num_rows, tile.block_m))](
        x,
        tuple(weights),
        tuple(scales),
        # In the place of a bias that is not there stands a tensor that is not read.
        tuple(x if bias is None else bias for bias in biases),
        y,
        sizes,
        num_rows,
        x.stride(0),
        y.stride(0),
        BIASED=sum(1 << i for i, bias in enumerate(biases) if bias is not None),
        K=depth,
        GROUP=group if is_int4 else 0,
        ZEROS=zeros,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        PARTS=tile.num_parts,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )
    return y


def _is_ours(x: Tensor, sizes: Sequence[int]) -> bool:
    """Whether the kernel is the faster way, by shapes alone."""
    num_rows, depth = x.shape
    if num_rows == 0 or depth == 0 or sum(sizes) == 0:
        return False
    # More of float32 would have to be multiplied outside the tensor cores.
    return num_rows <= (1 if x.dtype == torch.float32 else MAX_ROWS)


def _in_memory(
    weights: Sequence[Tensor], scales: Sequence[Tensor], dtype: torch.dtype
) -> Sequence[Tensor]:
    """What the weights are worth, each rounded to ``dtype``."""
    widened = []
    for weight, scale in zip(weights, scales, strict=True):
        num_rows, num_bytes = weight.shape
        is_int4 = weight.dtype == INT4
        depth = num_bytes * (1 + is_int4)
        out = weight.new_empty(num_rows, depth, dtype=dtype)
        if out.numel() > 0:
            grid = (triton.cdiv(num_rows, _WIDE_ROWS), triton.cdiv(depth, _WIDE_COLUMNS))
            _widen_kernel[grid](
                weight,
                scale,
                out,
                num_rows,
                K=depth,
                GROUP=group_of(weight, scale) if is_int4 else 0,
                ZEROS=has_zeros(weight, scale),
                BLOCK_N=_WIDE_ROWS,
                BLOCK_K=_WIDE_COLUMNS,
                num_warps=4,
            )
        widened.append(out)
    return widened


@triton.jit
def _widen_kernel(
    weight: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    N: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,  # 0 where a number has a byte, and a row one scale
    ZEROS: tl.constexpr,  # whether scales have zero points beside them
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One program: BLOCK_N rows of BLOCK_K numbers."""
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    mask = (row < N) & (k < K)
    if GROUP > 0:
        byte = tl.load(weight + row * (K // 2) + k // 2, mask=mask, other=0).to(tl.int32)
        p_scale = scales + (row * (K // GROUP) + k // GROUP) * (1 + ZEROS)
        scale, zero = scale_and_zero(p_scale, mask, ZEROS)
        number = ((byte >> (k % 2 * 4)) & 15).to(tl.float32) - zero
    else:
        number = tl.load(weight + row * K + k, mask=mask, other=0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < N, other=0.0)
    tl.store(out + row * K + k, (number * scale).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _integer_linear_kernel(
    x: tl.tensor,
    weights: tl.tuple,
    scales: tl.tuple,
    biases: tl.tuple,
    y: tl.tensor,
    sizes: tl.tuple,
    M: tl.tensor,
    stride_x: tl.tensor,
    stride_y: tl.tensor,
    BIASED: tl.constexpr,  # bit i: weight i has a bias
    K: tl.constexpr,
    GROUP: tl.constexpr,  # 0 where a number has a byte, and a row one scale
    ZEROS: tl.constexpr,  # whether scales have zero points beside them
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,  # of the depth, side by side: of few columns
    STAGES: tl.constexpr,
) -> None:
    """One program: BLOCK_N columns of BLOCK_M rows of y, of all unless there are parts."""
    ONE_ROW: tl.constexpr = BLOCK_M == 1
    weight, which, size, column, first_row = place(tl.program_id(0), weights, sizes, BLOCK_N)
    scale = scales[0]
    for i in tl.static_range(1, len(sizes)):
        scale = tl.where(which == i, scales[i], scale)
    row = first_row + tl.arange(0, BLOCK_N)
    index_m = tl.arange(0, BLOCK_M)
    if PARTS > 1:
        index_m += tl.program_id(1) * BLOCK_M
    mask_n, mask_m = row < size, index_m < M
    p_w, p_scale = rows_at(weight, scale, row.to(tl.int64), 0, K, GROUP, ZEROS)
    if ONE_ROW:
        SUMMED: tl.constexpr = x.dtype.element_ty == tl.float32
        SUMS: tl.constexpr = 1 if SUMMED else 16
        acc = tl.zeros([BLOCK_N, BLOCK_K // chunk_of(GROUP), SUMS], dtype=tl.float32)
        for first in range(0, K, BLOCK_K):
            acc += few_products(p_w, p_scale, x, first, mask_n, K, GROUP, ZEROS, BLOCK_K, SUMMED)
        acc = tl.sum(tl.sum(acc, 2), 1)[:, None]
    elif PARTS == 1:
        p_x = x + index_m.to(tl.int64)[:, None] * stride_x
        acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            k = first + tl.arange(0, BLOCK_K)[None, :]
            b_x = tl.load(p_x + k, mask=mask_m[:, None] & (k < K), other=0.0)
            b_w = wide_tile(p_w, p_scale, first, mask_n, K, GROUP, ZEROS, BLOCK_K, b_x.dtype)
            acc = dot(b_w, tl.trans(b_x), acc)
    else:
        DEPTH: tl.constexpr = K // PARTS
        index = tl.arange(0, PARTS * BLOCK_N)
        rows, start = first_row + index % BLOCK_N, index // BLOCK_N * DEPTH
        p_part, p_part_scale = rows_at(weight, scale, rows.to(tl.int64), start, K, GROUP, ZEROS)
        p_x = x + index_m.to(tl.int64)[None, :, None] * stride_x
        p_x += (tl.arange(0, PARTS) * DEPTH)[:, None, None]
        acc = tl.zeros([PARTS, BLOCK_N, BLOCK_M], dtype=tl.float32)
        for first in tl.range(0, DEPTH, BLOCK_K, num_stages=STAGES):
            k = first + tl.arange(0, BLOCK_K)[None, None, :]
            b_x = tl.load(p_x + k, mask=mask_m[None, :, None] & (k < DEPTH), other=0.0)
            b_w = wide_tile(
                p_part, p_part_scale, first, rows < size, DEPTH, GROUP, ZEROS, BLOCK_K, b_x.dtype
            )
            b_w = tl.reshape(b_w, [PARTS, BLOCK_N, BLOCK_K])
            acc = dot(b_w, tl.permute(b_x, (0, 2, 1)), acc)
        acc = tl.sum(acc, 0)
    if GROUP == 0:
        acc *= tl.load(p_scale, mask=mask_n, other=0.0)[:, None]
    acc += bias_of(biases, which, row, mask_n, BIASED)[:, None]
    p_y = y + index_m.to(tl.int64)[None, :] * stride_y + (column + row)[:, None]
    tl.store(p_y, acc.to(y.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])
