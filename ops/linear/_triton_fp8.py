# mypy: disable-error-code="untyped-decorator"
"""Weights of 8 bits in Triton, each sum of 128 products scaled in float32.

``fp8_linear`` leaves x as it is: weights are widened, in registers, or of many rows in memory once,
and torch multiplies. ``rounded_linear`` rounds x to 8 bits too, and multiplies those: of few rows
where they are loaded, of many by torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.formats.block_scales import BLOCK
from torch_hybrid.ops.linear._triton_columns import store_columns
from torch_hybrid.ops.linear._triton_place import bias_of, place
from torch_hybrid.ops.linear.by_torch import empty_columns, product_by_torch
from torch_hybrid.ops.triton.devices import is_hopper
from torch_hybrid.ops.triton.fp8 import fp8_dot, readable, rounded_row, rounded_rows, widen
from torch_hybrid.ops.triton.products import dot

# Past it a weight is read and multiplied so often that widening it in memory is the faster way.
MAX_ROWS = 128
# Past these, torch multiplies what is rounded: by one weight, and by several one after the other.
MAX_ROUNDED_ROWS = 32
MAX_ROUNDED_ROWS_OF_SEVERAL = 128
# Few rows and columns are multiplied outside the tensor cores, which leaves more programs.
_FEW_ROWS = 4
_FEW_COLUMNS = 4096
# With more rows, programs have few columns, and their warps share the depth.
_PART_ROWS = 32
_PART_DEPTH = 1024
_BLOCK: tl.constexpr = tl.constexpr(BLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows of x and of a weight that a program multiplies, ``block_k`` columns at a time in each of
    ``num_parts`` parts side by side. Decided by shapes alone.

    ``block_n`` divides 128: the rows of a program have one scale for each 128 columns.
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_parts: int = 1
    num_warps: int = 4

    @classmethod
    def of(cls, num_rows: int, num_columns: int, depth: int) -> Tile:
        """For that many rows of x, and columns of all weights' results, of sums so deep."""
        if num_rows <= _FEW_ROWS and num_columns <= _FEW_COLUMNS:
            block_m = triton.next_power_of_2(num_rows)
            return cls(block_m=block_m, block_n=8, block_k=512, num_stages=4)
        if num_rows <= _PART_ROWS and num_columns <= _FEW_COLUMNS and depth >= _PART_DEPTH:
            block_m = 16 if num_rows <= 16 else 32
            return cls(block_m=block_m, block_n=16, block_k=128, num_stages=3, num_parts=4)
        block_m, stages = (16, 5) if num_rows <= 16 else (32, 4) if num_rows <= 32 else (64, 3)
        # Weights that are widened take registers.
        num_warps = 4 if block_m < 64 else 8
        return cls(block_m=block_m, block_n=64, block_k=128, num_stages=stages, num_warps=num_warps)

    @classmethod
    def rounding(cls, num_rows: int, num_columns: int, depth: int) -> Tile:
        """The same where x is rounded too."""
        if num_rows <= _FEW_ROWS and num_columns <= _FEW_COLUMNS and depth < _PART_DEPTH:
            return cls.of(num_rows, num_columns, depth)
        if num_rows <= _PART_ROWS and num_columns <= _FEW_COLUMNS and depth >= _PART_DEPTH:
            block_m = 16 if num_rows <= 16 else 32
            return cls(block_m=block_m, block_n=16, block_k=128, num_stages=4, num_parts=4)
        block_m, stages = (16, 5) if num_rows <= 16 else (32, 4) if num_rows <= 32 else (64, 4)
        return cls(block_m=block_m, block_n=64, block_k=128, num_stages=stages)


def fp8_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scales: Sequence[Tensor],
) -> Tensor:
    """What ``linear`` returns of weights that have scales."""
    num_rows, depth = x.shape
    sizes = tuple(weight.shape[0] for weight in weights)
    y = empty_columns(x, sizes)
    if not _is_ours(x, sizes):
        widened = _in_memory(weights, scales, x.dtype)
        return product_by_torch(x, widened, biases, y)
    _launch(x, weights, biases, scales, y, Tile.of(num_rows, sum(sizes), depth), rounds=False)
    return y


def rounded_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    scales: Sequence[Tensor],
) -> Tensor:
    """Launcher of ``torch_hybrid::linear``, of weights that have scales, and of others behind."""
    num_scaled = len(scales)
    if num_scaled < len(weights):
        return _mixed_linear(x, weights, biases, scales)
    num_rows, depth = x.shape
    sizes = tuple(weight.shape[0] for weight in weights)
    if num_rows > _most_rows(num_scaled) and _suits_torch(x, sizes):
        return _rounded_product_by_torch(x, weights, biases, scales)
    y = x.new_empty(num_rows, sum(sizes))
    if num_rows == 0 or depth == 0 or sum(sizes) == 0:
        return product_by_torch(x, [w.to(x.dtype) for w in weights], biases, y)
    _launch(x, weights, biases, scales, y, Tile.rounding(num_rows, sum(sizes), depth), rounds=True)
    return y


def _mixed_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scales: Sequence[Tensor],
) -> Tensor:
    """The same of weights that have scales and others behind: one launch, or apart."""
    num_rows, depth = x.shape
    num_scaled = len(scales)
    sizes = tuple(weight.shape[0] for weight in weights)
    if 0 < num_rows <= _most_rows(num_scaled) and depth >= _PART_DEPTH and x.itemsize == 2:
        y = x.new_empty(num_rows, sum(sizes))
        tile = Tile.rounding(num_rows, sum(sizes), depth)
        _launch_mixed(x, weights, biases, scales, y, tile)
        return y
    rounded = rounded_linear(x, weights[:num_scaled], biases[:num_scaled], scales=scales)
    others = x.new_empty(num_rows, sum(sizes[num_scaled:]))
    others = product_by_torch(x, weights[num_scaled:], biases[num_scaled:], others)
    return torch.cat((rounded, others), 1)


def _most_rows(num_weights: int) -> int:
    """Past which torch is the faster way."""
    return MAX_ROUNDED_ROWS if num_weights == 1 else MAX_ROUNDED_ROWS_OF_SEVERAL


def _launch(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scales: Sequence[Tensor],
    y: Tensor,
    tile: Tile,
    *,
    rounds: bool,
) -> None:
    num_rows, depth = x.shape
    sizes = tuple(weight.shape[0] for weight in weights)
    numbers, units = x, x
    if rounds and tile.block_m > _FEW_ROWS:
        numbers, units = rounded_rows(x)
        numbers = readable(numbers)
    _fp8_linear_kernel[_grid(num_rows, sizes, tile)](
        numbers,
        units,
        tuple(map(readable, weights)),
        tuple(scales),
        _readable_biases(x, biases),
        y,
        sizes,
        num_rows,
        numbers.stride(0),
        y.stride(0),
        BIASED=_biased(biases),
        ROUNDS=rounds,
        **_options(tile, depth),
    )


def _launch_mixed(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scales: Sequence[Tensor],
    y: Tensor,
    tile: Tile,
) -> None:
    num_rows, depth = x.shape
    sizes = tuple(weight.shape[0] for weight in weights)
    num_scaled = len(scales)
    numbers, units = rounded_rows(x)
    numbers = readable(numbers)
    readable_biases = _readable_biases(x, biases)
    _mixed_linear_kernel[_grid(num_rows, sizes, tile)](
        x,
        numbers,
        units,
        tuple(map(readable, weights[:num_scaled])),
        tuple(scales),
        readable_biases[:num_scaled],
        sizes[:num_scaled],
        tuple(weights[num_scaled:]),
        readable_biases[num_scaled:],
        sizes[num_scaled:],
        y,
        num_rows,
        x.stride(0),
        numbers.stride(0),
        y.stride(0),
        BIASED=_biased(biases),
        **_options(tile, depth),
    )


def _grid(num_rows: int, sizes: Sequence[int], tile: Tile) -> tuple[int, int]:
    num_tiles = sum(triton.cdiv(size, tile.block_n) for size in sizes)
    return num_tiles, triton.cdiv(num_rows, tile.block_m)


def _options(tile: Tile, depth: int) -> dict[str, int]:
    """How either kernel is built and launched."""
    return {
        "K": depth,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "PARTS": tile.num_parts,
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
        "enable_fp_fusion": True,
    }


def _readable_biases(x: Tensor, biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """In the place of a bias that is not there, a tensor that is not read."""
    return tuple(x if bias is None else bias for bias in biases)


def _biased(biases: Sequence[Tensor | None]) -> int:
    """Bit i: there is bias i."""
    return sum(1 << i for i, bias in enumerate(biases) if bias is not None)


def _suits_torch(x: Tensor, sizes: Sequence[int]) -> bool:
    """Whether torch multiplies 8 bits by 8 bits of these."""
    return (
        is_hopper(x.device)
        and _cublas_scales_blocks()
        and x.dtype == torch.bfloat16
        # Rows of scales of a weight, of numbers, and of results, as cuBLAS takes them.
        and x.shape[1] % (4 * BLOCK) == 0
        and all(size % 16 == 0 for size in sizes)
    )


@cache
def _cublas_scales_blocks() -> bool:
    """Since CUDA 12.9."""
    numbers = (torch.version.cuda or "0.0").split(".")
    return (int(numbers[0]), int(numbers[1])) >= (12, 9)


def _rounded_product_by_torch(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    scales: Sequence[Tensor],
) -> Tensor:
    from torch.nn.functional import ScalingType, scaled_mm

    # cuBLAS takes rows by fours.
    num_rows = x.shape[0]
    numbers, units = rounded_rows(x, num_rows=4 * triton.cdiv(num_rows, 4))
    parts = []
    for weight, bias, scale in zip(weights, biases, scales, strict=True):
        part = scaled_mm(
            numbers,
            weight.T,
            units.T,
            ScalingType.BlockWise1x128,
            scale.T,
            ScalingType.BlockWise128x128,
            output_dtype=x.dtype,
        )[:num_rows]
        parts.append(part if bias is None else part.add_(bias))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _is_ours(x: Tensor, sizes: Sequence[int]) -> bool:
    """Whether the kernel is the faster way, by shapes alone."""
    num_rows, depth = x.shape
    if num_rows == 0 or depth == 0 or sum(sizes) == 0:
        return False
    if num_rows <= _FEW_ROWS and sum(sizes) <= _FEW_COLUMNS:
        return True
    # More of float32 would have to be multiplied outside the tensor cores.
    return num_rows <= MAX_ROWS and x.dtype != torch.float32


def _in_memory(
    weights: Sequence[Tensor], scales: Sequence[Tensor], dtype: torch.dtype
) -> Sequence[Tensor]:
    """What the weights are worth, each rounded to ``dtype``."""
    widened = [weight.new_empty(weight.shape, dtype=dtype) for weight in weights]
    for weight, scale, out in zip(weights, scales, widened, strict=True):
        if out.numel() > 0:
            num_rows, depth = weight.shape
            grid = (triton.cdiv(depth, BLOCK), triton.cdiv(num_rows, BLOCK))
            _widen_kernel[grid](readable(weight), scale, out, num_rows, K=depth, num_warps=4)
    return widened


@triton.jit
def _widen_kernel(
    weight: tl.tensor, scales: tl.tensor, out: tl.tensor, N: tl.tensor, K: tl.constexpr
) -> None:
    """One program: one block."""
    row = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    column = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    mask = (row < N)[:, None] & (column < K)[None, :]
    place = row.to(tl.int64)[:, None] * K + column[None, :]
    scale = tl.load(scales + tl.program_id(1) * tl.cdiv(K, _BLOCK) + tl.program_id(0))
    wide = widen(tl.load(weight + place, mask=mask, other=0.0), tl.float32) * scale
    tl.store(out + place, wide.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _fp8_linear_kernel(
    x: tl.tensor,
    units: tl.tensor,  # of x's numbers, where those have 8 bits
    weights: tl.tuple,
    scales: tl.tuple,
    biases: tl.tuple,
    y: tl.tensor,
    sizes: tl.tuple,
    M: tl.tensor,
    stride_x: tl.tensor,
    stride_y: tl.tensor,
    BIASED: tl.constexpr,  # bit i: weight i has a bias
    ROUNDS: tl.constexpr,  # x too, where it is not yet
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """One program: BLOCK_N columns of BLOCK_M rows of y."""
    _store_columns(
        tl.program_id(0), x, units, weights, scales, biases, y, sizes, M, stride_x, stride_y,
        BIASED, ROUNDS, K, BLOCK_M, BLOCK_N, BLOCK_K, PARTS, STAGES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _mixed_linear_kernel(
    x: tl.tensor,
    numbers: tl.tensor,  # of x in 8 bits
    units: tl.tensor,
    weights: tl.tuple,  # of 8 bits
    scales: tl.tuple,
    biases: tl.tuple,
    sizes: tl.tuple,
    others: tl.tuple,  # weights of x's dtype
    other_biases: tl.tuple,
    other_sizes: tl.tuple,
    y: tl.tensor,
    M: tl.tensor,
    stride_x: tl.tensor,
    stride_numbers: tl.tensor,
    stride_y: tl.tensor,
    BIASED: tl.constexpr,  # bit i: weight i has a bias, of all weights
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """The same, where programs behind those of ``weights`` multiply x itself by ``others``."""
    tile = tl.program_id(0)
    first_tile, first_column = 0, 0
    for i in tl.static_range(len(sizes)):
        first_tile += (sizes[i] + BLOCK_N - 1) // BLOCK_N
        first_column += sizes[i]
    if tile < first_tile:
        _store_columns(
            tile, numbers, units, weights, scales, biases, y, sizes, M, stride_numbers, stride_y,
            BIASED, True, K, BLOCK_M, BLOCK_N, BLOCK_K, PARTS, STAGES,
        )  # fmt: skip
    else:
        index_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        store_columns(
            tile - first_tile, index_m, x, others, other_biases, y + first_column, other_sizes, M,
            stride_x, stride_y, BIASED >> len(weights), K, BLOCK_N, BLOCK_K, PARTS, STAGES,
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
) -> None:
    """A tile of BLOCK_N columns.

    Few rows are multiplied as the weights come. Of more, the weight is the left side of products of
    tensor cores; each warp has a part of the depth where there are PARTS.
    """
    FEW: tl.constexpr = BLOCK_M < 16
    weight, which, size, column, first_row = place(tile, weights, sizes, BLOCK_N)
    scale = scales[0]
    for i in tl.static_range(1, len(sizes)):
        scale = tl.where(which == i, scales[i], scale)
    scale += first_row // _BLOCK * tl.cdiv(K, _BLOCK)
    row = first_row + tl.arange(0, BLOCK_N)
    index_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_n, mask_m = row < size, index_m < M
    p_w = weight + row.to(tl.int64)[:, None] * K
    p_x = x + index_m.to(tl.int64)[:, None] * stride_x
    p_unit = units + index_m
    if FEW:
        acc = _sum_as_it_comes(p_w, p_x, scale, mask_n, mask_m, ROUNDS, K, BLOCK_K, STAGES)
    elif PARTS > 1:
        acc = _sum_in_parts(p_w, p_x, p_unit, M, scale, mask_n, mask_m, K, BLOCK_K, PARTS, STAGES)
    else:
        acc = _sum(p_w, p_x, p_unit, M, scale, mask_n, mask_m, K, BLOCK_K, STAGES)
    acc += bias_of(biases, which, row, mask_n, BIASED)[:, None]
    p_y = y + index_m.to(tl.int64)[None, :] * stride_y + (column + row)[:, None]
    tl.store(p_y, acc.to(y.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


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
    """[BLOCK_N, BLOCK_M] products of rows of a weight and of x, which the pointers begin."""
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
    """The same, of which each warp sums its own columns."""
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
    """The same, outside the tensor cores."""
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
