"""INT8, INT4 and FP4 weights in Triton: widened in registers, a tile of rows and columns at a time.

GROUP is the number of INT4 or FP4 weights that share a scale, or 0 for INT8, which has a scale a
row. ZEROS is 1 where a zero point lies beside each scale, and 2 for FP4, whose scales are bytes:
powers of two of 32 weights (MXFP4), or FP8 of 16, behind which a row has a factor (NVFP4).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.formats.integers import FP4, INT8, group_of, has_zeros

# float32 with these bits and a small integer among the lowest is 2^23 and that integer: so a number
# is widened by two instructions of full rate, where a conversion has a quarter of it.
_BITS: tl.constexpr = tl.constexpr(0x4B000000)
_BASE: tl.constexpr = tl.constexpr(float(1 << 23))
_FP4: tl.constexpr = tl.constexpr(2)  # of ZEROS
# Bits of FP4, moved to the exponent and fraction of a float32, are worth this much less.
_FP4_BIAS: tl.constexpr = tl.constexpr(2.0**126)


def as_bytes(weight: Tensor) -> Tensor:
    """View words of FP4 as bytes of two numbers, as the kernels read them."""
    return weight.view(torch.uint8) if weight.dtype == FP4 else weight


def form_of(weight: Tensor, scales: Tensor) -> tuple[int, int]:
    """Return GROUP and ZEROS of a weight."""
    if weight.dtype == INT8:
        return 0, 0
    return group_of(weight, scales), 2 if weight.dtype == FP4 else int(has_zeros(weight, scales))


@triton.constexpr_function
def chunk_bytes(group: int) -> int:
    """Return how many bytes a thread loads at once: 16, or those of a group."""
    return 8 if group == 16 else 16


@triton.constexpr_function
def chunk_of(group: int) -> int:
    """Return how many weights a thread loads at once."""
    loaded: int = chunk_bytes(group)
    return loaded * (2 if group else 1)


@triton.constexpr_function
def scales_in_row(depth: int, group: int, zeros: int) -> int:
    """Return how many elements of scales a row of groups has."""
    if zeros == 2:
        return depth // group + (4 if group == 16 else 0)
    return depth // group * (1 + zeros)


@triton.jit
def scale_and_zero(
    pointer: tl.tensor, mask: tl.tensor, GROUP: tl.constexpr, ZEROS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Load the scales of groups and their zero points: 8 where none are stored.

    Scales of NVFP4 come without the factor of their row.
    """
    if ZEROS == _FP4:
        bits = tl.load(pointer, mask=mask, other=0).to(tl.int32)
        if GROUP == 16:
            scale = ((bits & 127) << 20).to(tl.float32, bitcast=True) * (2.0**120)
            scale = tl.where((bits & 127) == 127, float("nan"), scale)
            scale = tl.where(bits > 127, -scale, scale)
        else:
            # The first is a denormal float; the last one stands for NaN.
            least = ((bits == 0) | (bits == 255)).to(tl.int32) << 22
            scale = ((bits << 23) | least).to(tl.float32, bitcast=True)
        zero = scale  # which nobody reads
    else:
        scale = tl.load(pointer, mask=mask, other=0.0)
        if ZEROS:
            zero = tl.load(pointer + 1, mask=mask, other=0.0)
        else:
            zero = tl.full(scale.shape, 8.0, dtype=tl.float32)
    return scale, zero


@triton.jit
def rows_at(
    weight: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return pointers to column ``first`` of rows of a weight, and to its scale."""
    if GROUP > 0:
        p_w = weight + row * (K // 2) + first // 2
        p_scale = scales + row * scales_in_row(K, GROUP, ZEROS)
        p_scale += first // GROUP * (2 if ZEROS == 1 else 1)
    else:
        p_w = weight + row * K + first
        p_scale = scales + row
    return p_w, p_scale


@triton.jit
def row_scale(
    p_scale: tl.tensor, mask: tl.tensor, K: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr
) -> tl.tensor:
    """Load what sums of rows are multiplied by: a scale, or NVFP4's factor, else 1."""
    scale = tl.full(mask.shape, 1.0, dtype=tl.float32)
    if GROUP == 0:
        scale = tl.load(p_scale, mask=mask, other=0.0)
    elif ZEROS == _FP4 and GROUP == 16:
        bits = tl.zeros(mask.shape, dtype=tl.int32)
        for i in tl.static_range(4):
            byte = tl.load(p_scale + (K // GROUP + i), mask=mask, other=0)
            bits |= byte.to(tl.int32) << (8 * i)
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def fp4(codes: tl.tensor) -> tl.tensor:
    """Convert int32 of four bits each to what they are worth in FP4."""
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * _FP4_BIAS


@triton.jit
def _halves(stored: tl.tensor, zero: tl.tensor, ZEROS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Unpack each byte's two weights to float32, low and high, less their group's zero points.

    High weights of INT4 stay in their bits: they come 16 times too large, and so those of FP4.
    """
    word = stored.to(tl.int32)
    if ZEROS == _FP4:
        low, high = fp4(word), fp4(word >> 4) * 16
    else:
        low = ((word & 15) | _BITS).to(tl.float32, bitcast=True)
        high = ((word & 240) | _BITS).to(tl.float32, bitcast=True)
        if ZEROS:
            low, high = (low - _BASE) - zero, (high - _BASE) - 16 * zero
        else:
            low, high = low - (_BASE + 8), high - (_BASE + 128)
    return low, high


@triton.jit
def wide_tile(
    p_w: tl.tensor,
    p_scale: tl.tensor,
    first: tl.tensor,
    mask_n: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Load a weight tile [BLOCK_N, BLOCK_K] from column ``first`` on, in DTYPE.

    Groups are scaled by the scales that begin at p_scale [BLOCK_N]; what :func:`row_scale` loads is
    left to sums. BLOCK_K is a multiple of GROUP, or divides it.
    """
    BLOCK_N: tl.constexpr = p_w.shape[0]
    if GROUP > 0:
        # Columns of this tile that share a scale.
        PART: tl.constexpr = GROUP if GROUP < BLOCK_K else BLOCK_K
        part = first // PART + tl.arange(0, BLOCK_K // PART)
        mask = mask_n[:, None] & (part < K // PART)[None, :]
        group = part if PART == GROUP else part // (GROUP // PART)
        p_group = p_scale[:, None] + group[None, :] * (2 if ZEROS == 1 else 1)
        scale, zero = scale_and_zero(p_group, mask, GROUP, ZEROS)
        scale, zero = scale[:, :, None], zero[:, :, None]
        byte = (part * (PART // 2))[:, None] + tl.arange(0, PART // 2)[None, :]
        stored = tl.load(p_w[:, None, None] + byte[None, :, :], mask=mask[:, :, None], other=0)
        low, high = _halves(stored, zero, ZEROS)
        tile = tl.join(low * scale, high * (scale / 16)).to(DTYPE)
        tile = tl.reshape(tile, [BLOCK_N, BLOCK_K])
    else:
        k = first + tl.arange(0, BLOCK_K)[None, :]
        tile = tl.load(p_w[:, None] + k, mask=mask_n[:, None] & (k < K), other=0)
        tile = tile.to(tl.float32).to(DTYPE)
    return tile


@triton.jit
def few_products(
    p_w: tl.tensor,
    p_scale: tl.tensor,
    p_x: tl.tensor,
    first: tl.tensor,
    mask_n: tl.tensor,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUMMED: tl.constexpr = False,
) -> tl.tensor:
    """Multiply a weight tile by one row of x at p_x, outside the tensor cores.

    Returns:
        [BLOCK_N, chunks, bytes] float32 sums, one a byte, for the caller to add up; with SUMMED,
        [BLOCK_N, chunks, 1]: a chunk is summed before it is scaled, with fewer roundings.
    """
    CHUNK: tl.constexpr = chunk_of(GROUP)
    chunk = first // CHUNK + tl.arange(0, BLOCK_K // CHUNK)
    BYTES: tl.constexpr = chunk_bytes(GROUP)
    byte = (chunk * BYTES)[:, None] + tl.arange(0, BYTES)[None, :]
    p_byte = p_w[:, None, None] + byte[None, :, :]
    if GROUP > 0:
        is_there = chunk < K // CHUNK
        mask = mask_n[:, None] & is_there[None, :]
        p_group = p_scale[:, None] + (chunk * CHUNK // GROUP)[None, :] * (2 if ZEROS == 1 else 1)
        scale, zero = scale_and_zero(p_group, mask, GROUP, ZEROS)
        low, high = _halves(
            tl.load(p_byte, mask=mask[:, :, None], other=0), zero[:, :, None], ZEROS
        )
        p_pair = p_x + (2 * byte)[:, :, None] + tl.arange(0, 2)[None, None, :]
        pair = tl.load(p_pair, mask=is_there[:, None, None], other=0.0).to(tl.float32)
        even, odd = tl.split(pair)
        products = low * even[None, :, :] + high * (odd / 16)[None, :, :]
        if SUMMED:
            products = tl.sum(products, 2, keep_dims=True)
        products *= scale[:, :, None]
    else:
        stored = tl.load(p_byte, mask=mask_n[:, None, None] & (byte < K)[None, :, :], other=0)
        bits = ((stored.to(tl.int32) & 255) ^ 128) | _BITS
        b_x = tl.load(p_x + byte, mask=byte < K, other=0.0).to(tl.float32)
        products = (bits.to(tl.float32, bitcast=True) - (_BASE + 128)) * b_x[None, :, :]
        if SUMMED:
            products = tl.sum(products, 2, keep_dims=True)
    return products
