"""INT8, INT4 and FP4 weights in Triton: widened in registers, so that x is not rounded.

For many rows, weights are widened in memory once, and torch multiplies.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.formats.integers import depth_of
from torch_hybrid.ops.linear._triton_place import place, scales_of, store_tile
from torch_hybrid.ops.linear._triton_tile import Tile, is_empty, readable_biases, tile_of_any_rows
from torch_hybrid.ops.linear.by_torch import empty_columns, product_by_torch
from torch_hybrid.ops.linear.op import Linear
from torch_hybrid.ops.triton.integers import (
    as_bytes,
    chunk_bytes,
    chunk_of,
    few_products,
    form_of,
    fp4,
    row_scale,
    rows_at,
    scale_and_zero,
    wide_tile,
)
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.products import dot

# Past it a weight is read so often that widening it in memory is the faster way.
MAX_ROWS = 64
_WIDE_ROWS, _WIDE_COLUMNS = 32, 128  # of a tile that is widened in memory

# Few columns make few programs: the warps of one share the depth, and 16 columns are enough for it.
# INT4 takes so long to widen that warps better share the depth whatever the columns.
_FEW_COLUMNS = 4096
_PART_ROWS = 32  # that a program multiplies so at most


def integer_linear(x: Linear, *, is_invariant: bool = False) -> Tensor:
    """Multiply by INT8, INT4 or FP4 weights: few rows in one launch, others by torch.

    With ``is_invariant``, any number of rows is multiplied in one launch for weights of one form.
    """
    formats = {form_of(*pair) for pair in x.scaled}
    if is_invariant and len(formats) > 1:
        each = zip(x.scaled, x.biases, strict=True)
        alone = [replace(x, weights=[w], scales=[scale], biases=[b]) for (w, scale), b in each]
        return torch.cat([integer_linear(one, is_invariant=True) for one in alone], 1)
    y = empty_columns(x.x, x.sizes)
    if is_invariant and not y.numel():
        return y
    if not is_invariant and (not _is_ours(x) or len(formats) > 1):
        return product_by_torch(x.x, _dequantized(x), x.biases, y)
    group, zeros = formats.pop()
    tile = tile_of_any_rows(x) if is_invariant else _tile(x, is_int4=group > 0)
    bind(_integer_linear_kernel, x)[tile.grid(x)](
        weights=tuple(map(as_bytes, x.weights)),
        scales=tuple(x.scales or ()),
        biases=readable_biases(x),
        y=y,
        M=x.x.shape[0],
        GROUP=group,
        ZEROS=zeros,
        ROWS_IN_BLOCKS=is_invariant or tile.num_parts > 1,
        **tile.options(x),
    )
    return y


def _tile(x: Linear, *, is_int4: bool) -> Tile:
    """Choose the tile that programs multiply."""
    num_rows, depth = x.x.shape
    few_columns = sum(x.sizes) <= _FEW_COLUMNS
    if num_rows == 1:  # outside the tensor cores
        if is_int4 and not few_columns:
            return Tile(block_m=1, block_n=16, block_k=256, num_stages=1, num_warps=8)
        return Tile(block_m=1, block_n=4, block_k=512, num_stages=1)
    block_m = max(16, triton.next_power_of_2(num_rows))
    if (few_columns or (is_int4 and num_rows <= 16)) and depth % 512 == 0:
        block_m = min(block_m, _PART_ROWS)
        return Tile(block_m=block_m, block_n=16, block_k=128, num_stages=3, num_parts=4)
    block_n = 32 if num_rows <= 16 and not is_int4 else 64
    return Tile(block_m=block_m, block_n=block_n, block_k=128, num_stages=3)


def _is_ours(x: Linear) -> bool:
    """Tell by shapes alone whether the kernel is faster than torch."""
    # More of float32 would have to be multiplied outside the tensor cores.
    return not is_empty(x) and len(x.x) <= (1 if x.x.dtype == torch.float32 else MAX_ROWS)


def _dequantized(x: Linear) -> list[Tensor]:
    """Write the weights to memory, dequantized to x's dtype."""
    widened = []
    for weight, scale in x.scaled:
        num_rows, depth = len(weight), depth_of(weight)
        group, zeros = form_of(weight, scale)
        out = weight.new_empty(num_rows, depth, dtype=x.x.dtype)
        if out.numel() > 0:
            grid = (triton.cdiv(num_rows, _WIDE_ROWS), triton.cdiv(depth, _WIDE_COLUMNS))
            _widen_kernel[grid](
                as_bytes(weight),
                scale,
                out,
                num_rows,
                K=depth,
                GROUP=group,
                ZEROS=zeros,
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
    GROUP: tl.constexpr,  # numbers of a row that share a scale; 0 for INT8
    ZEROS: tl.constexpr,  # what scales are, as ``ops/triton/integers.py`` says
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Dequantize a weight in memory. Grid: tiles of BLOCK_N rows and BLOCK_K columns."""
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    mask = (row < N) & (k < K)
    if GROUP > 0:
        p_w, p_scale = rows_at(weight, scales, row, k, K, GROUP, ZEROS)
        scale, zero = scale_and_zero(p_scale, mask, GROUP, ZEROS)
        code = (tl.load(p_w, mask=mask, other=0).to(tl.int32) >> (k % 2 * 4)) & 15
        if ZEROS == 2:
            p_row = rows_at(weight, scales, row, 0, K, GROUP, ZEROS)[1]
            number = fp4(code) * row_scale(p_row, row < N, K, GROUP, ZEROS)
        else:
            number = code.to(tl.float32) - zero
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
    GROUP: tl.constexpr,  # numbers of a row that share a scale; 0 for INT8
    ZEROS: tl.constexpr,  # what scales are, as ``ops/triton/integers.py`` says
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,  # of the depth, side by side: of few columns
    STAGES: tl.constexpr,
    ROWS_IN_BLOCKS: tl.constexpr,
) -> None:
    """Multiply x by all weights, widened in registers.

    Grid: tiles of BLOCK_N columns of all weights; with ROWS_IN_BLOCKS, blocks of BLOCK_M rows too.
    One row is multiplied outside the tensor cores. Else loads are pipelined in STAGES.
    """
    ONE_ROW: tl.constexpr = BLOCK_M == 1
    weight, which, size, column, first_row = place(tl.program_id(0), weights, sizes, BLOCK_N)
    scale = scales_of(scales, which)
    row = first_row + tl.arange(0, BLOCK_N)
    index_m = tl.arange(0, BLOCK_M)
    if ROWS_IN_BLOCKS:
        index_m += tl.program_id(1) * BLOCK_M
    mask_n, mask_m = row < size, index_m < M
    p_w, p_scale = rows_at(weight, scale, row.to(tl.int64), 0, K, GROUP, ZEROS)
    if ONE_ROW:
        SUMMED: tl.constexpr = x.dtype.element_ty == tl.float32
        SUMS: tl.constexpr = 1 if SUMMED else chunk_bytes(GROUP)
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
            if b_x.dtype == tl.float32:  # by +, a product would go on from the sum before it
                acc = tl.fma(acc, 1.0, dot(b_w, tl.trans(b_x), tl.zeros_like(acc)))
            else:
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
    if GROUP == 0 or GROUP == 16:
        acc *= row_scale(p_scale, mask_n, K, GROUP, ZEROS)[:, None]
    store_tile(acc, y, biases, which, row, column, index_m, mask_n, mask_m, stride_y, BIASED)
