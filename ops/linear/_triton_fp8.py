"""FP8 weights in Triton, each sum of 128 products scaled in float32.

``fp8_linear`` does not round x. Weights are widened in registers; for many rows in memory once, and
torch multiplies. ``rounded_linear`` rounds x to FP8 too, and multiplies FP8 by FP8: the kernel few
rows, torch many.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.formats.block_scales import BLOCK
from torch_hybrid.ops.linear._triton_columns import store_columns
from torch_hybrid.ops.linear._triton_place import place, scales_of, store_tile
from torch_hybrid.ops.linear._triton_tile import Tile, is_empty, readable_biases, tile_of_any_rows
from torch_hybrid.ops.linear.by_torch import empty_columns, product_by_torch
from torch_hybrid.ops.linear.op import Linear
from torch_hybrid.ops.triton.devices import is_hopper
from torch_hybrid.ops.triton.early import follow
from torch_hybrid.ops.triton.fp8 import fp8_dot, readable, rounded_row, rounded_rows, widen
from torch_hybrid.ops.triton.launch import early
from torch_hybrid.ops.triton.products import dot

# Past it a weight is read and multiplied so often that widening it in memory is the faster way.
MAX_ROWS = 128
# Past these, torch multiplies FP8 by FP8: one weight, and several one after the other.
MAX_ROUNDED_ROWS = 32
MAX_ROUNDED_ROWS_OF_SEVERAL = 128
# Few rows and columns are multiplied outside the tensor cores, which leaves more programs.
_FEW_ROWS = 4
_FEW_COLUMNS = 4096
_FEW_DEPTH = 2048  # of several rounded rows
# With more rows, programs have few columns, and their warps share the depth.
_PART_ROWS = 32
_PART_DEPTH = 1024
_BLOCK: tl.constexpr = tl.constexpr(BLOCK)


def fp8_linear(x: Linear, *, is_invariant: bool = False) -> Tensor:
    """Multiply x as it is by FP8 weights: few rows in one launch, others by torch.

    With ``is_invariant``, any number of rows is multiplied in one launch.
    """
    y = empty_columns(x.x, x.sizes)
    if is_invariant:
        if y.numel():
            _launch(x, y, tile_of_any_rows(x), rounds=False)
        return y
    if not _is_ours(x):
        return product_by_torch(x.x, _dequantized(x), x.biases, y)
    _launch(x, y, _tile(x), rounds=False)
    return y


def rounded_linear(x: Linear) -> Tensor:
    """Round x to FP8 and multiply it by FP8 weights: "triton_fp8". Weights of x's dtype meet x."""
    if len(x.scaled) < len(x.weights):
        return _mixed_linear(x)
    num_rows = x.x.shape[0]
    if num_rows > _most_rows(x) and _suits_torch(x):
        return _rounded_product_by_torch(x)
    y = x.x.new_empty(num_rows, sum(x.sizes))
    if is_empty(x):
        return product_by_torch(x.x, [w.to(x.x.dtype) for w in x.weights], x.biases, y)
    _launch(x, y, _rounding_tile(x), rounds=True)
    return y


def _mixed_linear(x: Linear) -> Tensor:
    """Multiply by FP8 weights and by those of x's dtype behind: in one launch, or apart."""
    (num_rows, depth), num_scaled = x.x.shape, len(x.scaled)
    if 0 < num_rows <= _most_rows(x) and depth >= _PART_DEPTH and x.x.itemsize == 2:
        y = x.x.new_empty(num_rows, sum(x.sizes))
        _launch(x, y, _rounding_tile(x), rounds=True)
        return y
    first = replace(x, weights=x.weights[:num_scaled], biases=x.biases[:num_scaled])
    others = x.x.new_empty(num_rows, sum(x.sizes[num_scaled:]))
    others = product_by_torch(x.x, x.weights[num_scaled:], x.biases[num_scaled:], others)
    return torch.cat((rounded_linear(first), others), 1)


def _most_rows(x: Linear) -> int:
    """Name the number of rows past which torch multiplies FP8 by FP8 faster."""
    return MAX_ROUNDED_ROWS if len(x.scaled) == 1 else MAX_ROUNDED_ROWS_OF_SEVERAL


def _launch(x: Linear, y: Tensor, tile: Tile, *, rounds: bool) -> None:
    """Fill ``y``; with ``rounds``, x is rounded to FP8 too, and meets other weights as it is."""
    num_scaled, biases = len(x.scaled), readable_biases(x)
    numbers, units = x.x, x.x
    if rounds and tile.block_m > _FEW_ROWS:
        numbers, units = rounded_rows(x.x)
        numbers = readable(numbers)
    others: tuple[object, ...] = (None,) * 5
    if num_scaled < len(x.weights):
        weights = tuple(x.weights[num_scaled:])
        others = (x.x, weights, biases[num_scaled:], x.sizes[num_scaled:], x.x.stride(0))
    _fp8_linear_kernel[tile.grid(x)](
        numbers,
        units,
        tuple(map(readable, x.weights[:num_scaled])),
        tuple(x.scales or ()),
        biases[:num_scaled],
        y,
        x.sizes[:num_scaled],
        x.x.shape[0],
        numbers.stride(0),
        y.stride(0),
        *others,
        ROUNDS=rounds,
        **tile.options(x),
        **early(y.device),
    )


def _tile(x: Linear) -> Tile:
    """Choose the tile where x is not rounded.

    ``block_n`` divides 128: the rows of a program have one scale for each 128 columns.
    """
    (num_rows, depth), num_columns = x.x.shape, sum(x.sizes)
    if num_rows <= _FEW_ROWS and num_columns <= _FEW_COLUMNS:
        return _tile_of_few(num_rows, depth)
    if num_rows <= _PART_ROWS and num_columns <= _FEW_COLUMNS and depth >= _PART_DEPTH:
        return _tile_in_parts(num_rows, num_stages=3)
    # Weights that are widened take registers.
    return _tile_of_columns(num_rows, most_stages=3, most_warps=8)


def _rounding_tile(x: Linear) -> Tile:
    """Choose the tile where x is rounded."""
    (num_rows, depth), num_columns = x.x.shape, sum(x.sizes)
    is_shallow = num_rows == 1 or depth <= _FEW_DEPTH
    if num_rows <= _FEW_ROWS and num_columns <= _FEW_COLUMNS and is_shallow:
        return _tile_of_few(num_rows, depth)
    if num_rows <= _PART_ROWS and num_columns <= _FEW_COLUMNS and depth >= _PART_DEPTH:
        return _tile_in_parts(num_rows, num_stages=4)
    return _tile_of_columns(num_rows, most_stages=4, most_warps=4)


def _tile_of_few(num_rows: int, depth: int) -> Tile:
    """Choose the tile of few rows and columns, whose loads are on their way at once in registers.

    ``block_k`` is a multiple of 128, as ``rounded_row`` wants it.
    """
    return Tile(
        block_m=triton.next_power_of_2(num_rows),
        block_n=4,
        block_k=1024 if depth > _FEW_DEPTH else max(BLOCK, triton.next_power_of_2(depth)),
        num_stages=1,
        num_warps=2 if depth <= 512 else 4,
    )


def _tile_in_parts(num_rows: int, num_stages: int) -> Tile:
    """Choose the tile of few columns, whose warps share the depth."""
    block_m = 16 if num_rows <= 16 else 32
    return Tile(block_m=block_m, block_n=16, block_k=128, num_stages=num_stages, num_parts=4)


def _tile_of_columns(num_rows: int, most_stages: int, most_warps: int) -> Tile:
    """Choose the tile of 64 columns; with 64 rows it has the stages and warps given."""
    if num_rows > 32:
        given = {"num_stages": most_stages, "num_warps": most_warps}
        return Tile(block_m=64, block_n=64, block_k=128, **given)
    block_m, stages = (16, 5) if num_rows <= 16 else (32, 4)
    return Tile(block_m=block_m, block_n=64, block_k=128, num_stages=stages)


def _suits_torch(x: Linear) -> bool:
    """Tell whether torch multiplies FP8 by FP8 of these shapes, on this device."""
    return (
        is_hopper(x.x.device)
        and _cublas_scales_blocks()
        and x.x.dtype == torch.bfloat16
        # Rows of scales of a weight, of numbers, and of results, as cuBLAS takes them.
        and x.x.shape[1] % (4 * BLOCK) == 0
        and all(size % 16 == 0 for size in x.sizes)
    )


@cache
def _cublas_scales_blocks() -> bool:
    """Tell whether cuBLAS scales blocks, as it does since CUDA 12.9."""
    numbers = (torch.version.cuda or "0.0").split(".")
    return (int(numbers[0]), int(numbers[1])) >= (12, 9)


def _rounded_product_by_torch(x: Linear) -> Tensor:
    """Multiply rounded x by one FP8 weight after the other, by cuBLAS."""
    from torch.nn.functional import ScalingType, scaled_mm

    # cuBLAS takes rows by fours.
    num_rows = x.x.shape[0]
    numbers, units = rounded_rows(x.x, num_rows=4 * triton.cdiv(num_rows, 4))
    parts = []
    for (weight, scale), bias in zip(x.scaled, x.biases, strict=True):
        part = scaled_mm(
            numbers,
            weight.T,
            units.T,
            ScalingType.BlockWise1x128,
            scale.T,
            ScalingType.BlockWise128x128,
            output_dtype=x.x.dtype,
        )[:num_rows]
        parts.append(part if bias is None else part.add_(bias))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _is_ours(x: Linear) -> bool:
    """Tell by shapes alone whether the kernel is faster than torch."""
    if is_empty(x):
        return False
    num_rows = x.x.shape[0]
    if num_rows <= _FEW_ROWS and sum(x.sizes) <= _FEW_COLUMNS:
        return True
    # More of float32 would have to be multiplied outside the tensor cores.
    return num_rows <= MAX_ROWS and x.x.dtype != torch.float32


def _dequantized(x: Linear) -> list[Tensor]:
    """Write the weights to memory, dequantized to x's dtype."""
    widened = [weight.new_empty(weight.shape, dtype=x.x.dtype) for weight in x.weights]
    for (weight, scale), out in zip(x.scaled, widened, strict=True):
        if out.numel() > 0:
            num_rows, depth = weight.shape
            grid = (triton.cdiv(depth, BLOCK), triton.cdiv(num_rows, BLOCK))
            _widen_kernel[grid](readable(weight), scale, out, num_rows, K=depth, num_warps=4)
    return widened


@triton.jit
def _widen_kernel(
    weight: tl.tensor, scales: tl.tensor, out: tl.tensor, N: tl.tensor, K: tl.constexpr
) -> None:
    """Dequantize a weight in memory. Grid: blocks of 128 columns and of 128 rows."""
    row = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    column = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    mask = (row < N)[:, None] & (column < K)[None, :]
    place = row.to(tl.int64)[:, None] * K + column[None, :]
    scale = tl.load(scales + tl.program_id(1) * tl.cdiv(K, _BLOCK) + tl.program_id(0))
    wide = widen(tl.load(weight + place, mask=mask, other=0.0), tl.float32) * scale
    tl.store(out + place, wide.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _fp8_linear_kernel(
    x: tl.tensor,  # or its numbers in FP8
    units: tl.tensor,  # of x's numbers, where those are FP8
    weights: tl.tuple,
    scales: tl.tuple,
    biases: tl.tuple,
    y: tl.tensor,
    sizes: tl.tuple,
    M: tl.tensor,
    stride_x: tl.tensor,
    stride_y: tl.tensor,
    wide_x: tl.tensor | None,  # x as it is, for weights of its dtype
    others: tl.tuple | None,
    other_biases: tl.tuple | None,
    other_sizes: tl.tuple | None,
    stride_wide: tl.tensor | None,
    BIASED: tl.constexpr,  # bit i: weight i has a bias, of all weights
    ROUNDS: tl.constexpr,  # x too, where it is not yet
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Multiply x, or x rounded, by FP8 weights, and x as it is by others behind them.

    Grid: tiles of BLOCK_N columns of ``weights``, then of ``others``, and blocks of BLOCK_M rows.
    Loads are pipelined in STAGES through shared memory.
    """
    tile = tl.program_id(0)
    first_tile, first_column = 0, 0
    for i in tl.static_range(len(sizes)):
        first_tile += (sizes[i] + BLOCK_N - 1) // BLOCK_N
        first_column += sizes[i]
    if others is None or tile < first_tile:
        _store_columns(
            tile, x, units, weights, scales, biases, y, sizes, M, stride_x, stride_y,
            BIASED, ROUNDS, K, BLOCK_M, BLOCK_N, BLOCK_K, PARTS, STAGES, EARLY,
        )  # fmt: skip
    else:
        index_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        store_columns(
            tile - first_tile, index_m, wide_x, others, other_biases, y + first_column,
            other_sizes, M, stride_wide, stride_y, BIASED >> len(weights), K, BLOCK_N, BLOCK_K,
            PARTS, STAGES, EARLY,
        )  # fmt: skip


@triton.jit
def _store_columns(
    tile: tl.tensor,
    x: tl.tensor,
    units: tl.tensor,
    weights: tl.tuple,
    scales: tl.tuple,
    biases: tl.tuple,
    y: tl.tensor,
    sizes: tl.tuple,
    M: tl.tensor,
    stride_x: tl.tensor,
    stride_y: tl.tensor,
    BIASED: tl.constexpr,
    ROUNDS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Store a tile of BLOCK_N columns of BLOCK_M rows.

    Fewer than 16 rows are multiplied outside the tensor cores, as the weights come. Else the weight
    is the left operand of the tensor cores. With PARTS, each warp takes a part of the depth.
    """
    FEW: tl.constexpr = BLOCK_M < 16
    weight, which, size, column, first_row = place(tile, weights, sizes, BLOCK_N)
    scale = scales_of(scales, which)
    scale += first_row // _BLOCK * tl.cdiv(K, _BLOCK)
    row = first_row + tl.arange(0, BLOCK_N)
    index_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_n, mask_m = row < size, index_m < M
    p_w = weight + row.to(tl.int64)[:, None] * K
    p_x = x + index_m.to(tl.int64)[:, None] * stride_x
    p_unit = units + index_m
    follow(EARLY)
    if FEW:
        acc = _sum_as_it_comes(p_w, p_x, scale, mask_n, mask_m, ROUNDS, K, BLOCK_K, STAGES)
    elif PARTS > 1:
        acc = _sum_in_parts(p_w, p_x, p_unit, M, scale, mask_n, mask_m, K, BLOCK_K, PARTS, STAGES)
    else:
        acc = _sum(p_w, p_x, p_unit, M, scale, mask_n, mask_m, K, BLOCK_K, STAGES)
    store_tile(acc, y, biases, which, row, column, index_m, mask_n, mask_m, stride_y, BIASED)


@triton.jit
def _sum(
    p_w: tl.tensor,
    p_x: tl.tensor,
    p_unit: tl.tensor,
    M: tl.tensor,
    scale: tl.tensor,
    mask_n: tl.tensor,
    mask_m: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Sum products [BLOCK_N, BLOCK_M] of rows of a weight and of x, which the pointers begin."""
    index_k = tl.arange(0, BLOCK_K)
    zeros = tl.zeros([p_w.shape[0], p_x.shape[0]], dtype=tl.float32)
    acc = zeros
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = first + index_k
        b_w = tl.load(p_w + k[None, :], mask=mask_n[:, None] & (k < K)[None, :], other=0.0)
        b_x = tl.load(p_x + k[None, :], mask=mask_m[:, None] & (k < K)[None, :], other=0.0)
        b_scale = tl.load(scale + first // _BLOCK)
        if b_x.dtype == b_w.dtype:
            unit = tl.load(p_unit + first // _BLOCK * M, mask=mask_m, other=0.0)
            acc += fp8_dot(b_w, b_x, zeros) * (unit * b_scale)[None, :]
        else:
            acc += dot(widen(b_w, b_x.dtype), tl.trans(b_x), zeros) * b_scale
    return acc


@triton.jit
def _sum_in_parts(
    p_w: tl.tensor,
    p_x: tl.tensor,
    p_unit: tl.tensor,
    M: tl.tensor,
    scale: tl.tensor,
    mask_n: tl.tensor,
    mask_m: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Sum products [BLOCK_N, BLOCK_M], each warp a part of the depth."""
    zeros = tl.zeros([PARTS, p_w.shape[0], p_x.shape[0]], dtype=tl.float32)
    acc = zeros
    part = tl.arange(0, PARTS) * BLOCK_K
    index_k = tl.arange(0, BLOCK_K)
    for first in tl.range(0, K, PARTS * BLOCK_K, num_stages=STAGES):
        k = first + part[:, None, None] + index_k[None, None, :]
        mask = mask_n[None, :, None] & (k < K)
        b_w = tl.load(p_w[None, :, :] + k, mask=mask, other=0.0)
        mask = mask_m[None, :, None] & (k < K)
        b_x = tl.load(p_x[None, :, :] + k, mask=mask, other=0.0)
        b_scale = tl.load(scale + (first + part) // _BLOCK, mask=first + part < K, other=0.0)
        if b_x.dtype == b_w.dtype:
            p_own = p_unit[None, :] + ((first + part) // _BLOCK)[:, None] * M
            unit = tl.load(p_own, mask=mask_m[None, :] & (first + part < K)[:, None], other=0.0)
            acc += fp8_dot(b_w, b_x, zeros) * (unit * b_scale[:, None])[:, None, :]
        else:
            b_x = tl.permute(b_x, (0, 2, 1))
            acc += dot(widen(b_w, b_x.dtype), b_x, zeros) * b_scale[:, None, None]
    return tl.sum(acc, 0)


@triton.jit
def _sum_as_it_comes(
    p_w: tl.tensor,
    p_x: tl.tensor,
    scale: tl.tensor,
    mask_n: tl.tensor,
    mask_m: tl.tensor,
    ROUNDS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Sum products [BLOCK_N, BLOCK_M] outside the tensor cores."""
    acc = tl.zeros([p_w.shape[0], p_x.shape[0], BLOCK_K], dtype=tl.float32)
    index_k = tl.arange(0, BLOCK_K)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = first + index_k
        b_w = tl.load(p_w + k[None, :], mask=mask_n[:, None] & (k < K)[None, :], other=0.0)
        b_x = tl.load(p_x + k[None, :], mask=mask_m[:, None] & (k < K)[None, :], other=0.0)
        b_scale = tl.load(scale + k // _BLOCK, mask=k < K, other=0.0)
        if ROUNDS:
            b_x = rounded_row(b_x)
        scaled = b_x.to(tl.float32) * b_scale[None, :]
        acc += widen(b_w, tl.float32)[:, None, :] * scaled[None, :, :]
    return tl.sum(acc, 2)
