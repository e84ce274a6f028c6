"""FP8 (float8_e4m3fn) in Triton: widened in registers, or multiplied as it is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.formats.block_scales import BLOCK, LARGEST, num_blocks
from torch_hybrid.ops.triton.devices import converts_fp8, interpreted
from torch_hybrid.ops.triton.early import follow
from torch_hybrid.ops.triton.launch import early
from torch_hybrid.ops.triton.products import dot

# Bits of 8, shifted to their places in float32: sign, exponent and fraction.
_KEPT: tl.constexpr = tl.constexpr(-0x78100000)
# The exponent of float32 is biased by so much more.
_REBIAS: tl.constexpr = tl.constexpr(2.0**120)
_INTERPRETED: tl.constexpr = tl.constexpr(interpreted())
_BLOCK: tl.constexpr = tl.constexpr(BLOCK)
_LARGEST: tl.constexpr = tl.constexpr(LARGEST)
_LEAST: tl.constexpr = tl.constexpr(1e-12)  # as in ``block_scales``
_BLOCKS = 16  # that a program rounds: of one row, or of several short ones


def readable(weight: Tensor) -> Tensor:
    """View an FP8 weight as its device's kernels read it: as FP8, or as its bits (uint8)."""
    return weight if converts_fp8(weight.device) else weight.view(torch.uint8)


@triton.jit
def widen(numbers: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Widen FP8 numbers, or their bits, to a float dtype that holds each exactly."""
    if numbers.dtype == tl.uint8:
        bits = numbers.to(tl.int32) << 24
        wide = ((bits >> 4) & _KEPT).to(tl.float32, bitcast=True) * _REBIAS
        wide = tl.where((bits & 0x7F000000) == 0x7F000000, float("nan"), wide)
    else:
        wide = numbers
    return wide.to(dtype)


@triton.jit
def rounded(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Round rows [..., 128] to FP8; return them and each row's unit [...], as
    ``block_scales.rounded``."""
    LAST: tl.constexpr = len(x.shape) - 1
    wide = x.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), LAST), _LEAST)
    top = tl.full(largest.shape, _LARGEST, tl.float32)
    numbers = wide * tl.expand_dims(tl.div_rn(top, largest), LAST)
    return _to_8_bits(numbers), tl.div_rn(largest, top)


@triton.jit
def _to_8_bits(numbers: tl.tensor) -> tl.tensor:
    """Round float32 numbers to FP8.

    The interpreter's casts do not round: there the result is float32 with FP8's values.
    """
    if _INTERPRETED:
        bits = numbers.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        small = (numbers + 24576.0) - 24576.0  # multiples of 2^-9
        return tl.where(tl.abs(numbers) < 0.015625, small, normal)
    return numbers.to(tl.float8e4nv)


@triton.jit
def fp8_product(w: tl.tensor, x: tl.tensor, zeros: tl.tensor, ROUNDS: tl.constexpr) -> tl.tensor:
    """Multiply FP8 weight rows [..., N, 128] by x [..., M, 128]: sums [..., N, M].

    Weights are widened to x's dtype; with ROUNDS, rows of x are rounded to FP8 instead.
    """
    if ROUNDS:
        numbers, unit = rounded(x)
        return fp8_dot(w, numbers, zeros) * tl.expand_dims(unit, len(unit.shape) - 1)
    return dot(widen(w, x.dtype), _transposed(x), zeros)


@triton.jit
def fp8_dot(w: tl.tensor, x: tl.tensor, zeros: tl.tensor) -> tl.tensor:
    """Multiply FP8 rows w [..., N, K] by FP8 rows x [..., M, K], and add ``zeros``."""
    if _INTERPRETED:
        return dot(widen(w, tl.float32), _transposed(widen(x, tl.float32)), zeros)
    return tl.dot(w, _transposed(x), zeros)


@triton.jit
def _transposed(x: tl.tensor) -> tl.tensor:
    if len(x.shape) == 3:
        return tl.permute(x, (0, 2, 1))
    return tl.trans(x)


@triton.jit
def rounded_row(x: tl.tensor) -> tl.tensor:
    """Round rows [..., K] to FP8 and back to float32; K is a multiple of 128."""
    LAST: tl.constexpr = len(x.shape) - 1
    if LAST == 0:
        numbers, unit = rounded(tl.reshape(x, [x.shape[0] // _BLOCK, _BLOCK]))
    else:
        numbers, unit = rounded(tl.reshape(x, [x.shape[0], x.shape[1] // _BLOCK, _BLOCK]))
    left = numbers.to(tl.float32) * tl.expand_dims(unit, LAST + 1)
    return tl.reshape(left, x.shape)


def rounded_rows(x: Tensor, *, num_rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Round rows [M, K] to FP8, and return them with their units [ceil(K / 128), M].

    Units of one block of columns are contiguous. With ``num_rows``, both have that many rows; rows
    past M are uninitialised.
    """
    given, depth = x.shape
    num_rows = given if num_rows is None else num_rows
    numbers = x.new_empty(num_rows, depth, dtype=torch.float8_e4m3fn)
    units = x.new_empty(num_blocks(depth), num_rows, dtype=torch.float32)
    blocks = min(_BLOCKS, triton.next_power_of_2(num_blocks(depth)))
    rows = _BLOCKS // blocks
    _round_kernel[(triton.cdiv(given, rows), triton.cdiv(depth, blocks * BLOCK))](
        x,
        numbers,
        units,
        given,
        num_rows,
        x.stride(0),
        K=depth,
        ROWS=rows,
        BLOCKS=blocks,
        num_warps=4,
        **early(x.device),
    )
    return numbers, units


@triton.jit(do_not_specialize=["M", "num_rows"])
def _round_kernel(
    x: tl.tensor,
    numbers: tl.tensor,
    units: tl.tensor,
    M: tl.tensor,
    num_rows: tl.tensor,
    stride_x: tl.tensor,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Round ROWS rows times BLOCKS blocks of 128 columns to FP8, and store them with their units.

    Grid: (rows / ROWS, columns / (128 BLOCKS)). A tile is read once, rounded in registers and
    written.
    """
    follow(EARLY)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    k = block[None, :, None] * _BLOCK + tl.arange(0, _BLOCK)[None, None, :]
    mask = (row < M)[:, None, None] & (k < K)
    b_x = tl.load(x + (row * stride_x)[:, None, None] + k, mask=mask, other=0.0)
    b_numbers, b_unit = rounded(b_x)
    p_numbers = numbers + (row * K)[:, None, None] + k
    tl.store(p_numbers, b_numbers.to(numbers.dtype.element_ty), mask=mask)
    mask_unit = (row < M)[:, None] & (block * _BLOCK < K)[None, :]
    tl.store(units + block[None, :] * num_rows + row[:, None], b_unit, mask=mask_unit)
