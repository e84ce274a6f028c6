"""INT8 and INT4 weights in Triton: widened in registers, a tile of rows and columns at a time.

GROUP is the number of INT4 weights that share a scale, or 0 for INT8, which has a scale a row.
ZEROS tells whether a zero point lies beside each scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

# float32 with these bits and a small integer among the lowest is 2^23 and that integer: so a number
# is widened by two instructions of full rate, where a conversion has a quarter of it.
_BITS: tl.constexpr = tl.constexpr(0x4B000000)
_BASE: tl.constexpr = tl.constexpr(float(1 << 23))
_CHUNK_BYTES: tl.constexpr = tl.constexpr(16)  # that a thread loads at once


@triton.constexpr_function
def chunk_of(group: int) -> int:
    """Return how many weights a thread loads at once: 16 bytes."""
    return 32 if group else 16


@triton.jit
def scale_and_zero(
    pointer: tl.tensor, mask: tl.tensor, ZEROS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Load the scales of groups and their zero points: 8 where none are stored."""
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
        p_scale = scales + row * (K // GROUP * (1 + ZEROS)) + first // GROUP * (1 + ZEROS)
    else:
        p_w = weight + row * K + first
        p_scale = scales + row
    return p_w, p_scale


@triton.jit
def _halves(stored: tl.tensor, zero: tl.tensor, ZEROS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Unpack each byte's INT4 weights to float32, low and high, less their group's zero points.

    High weights stay in their bits: they come 16 times too large.
    """
    word = stored.to(tl.int32)
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

    INT4 is scaled by the scales that begin at p_scale [BLOCK_N]; INT8 is not scaled. BLOCK_K is a
    multiple of GROUP, or divides it.
    """
    BLOCK_N: tl.constexpr = p_w.shape[0]
    if GROUP > 0:
        # Columns of this tile that share a scale.
        PART: tl.constexpr = GROUP if GROUP < BLOCK_K else BLOCK_K
        part = first // PART + tl.arange(0, BLOCK_K // PART)
        mask = mask_n[:, None] & (part < K // PART)[None, :]
        group = part if PART == GROUP else part // (GROUP // PART)
        p_group = p_scale[:, None] + group[None, :] * (1 + ZEROS)
        scale, zero = scale_and_zero(p_group, mask, ZEROS)
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
        [BLOCK_N, chunks, 16] float32 sums, one a byte, for the caller to add up; with SUMMED,
        [BLOCK_N, chunks, 1]: a chunk is summed before it is scaled, with fewer roundings.
    """
    CHUNK: tl.constexpr = chunk_of(GROUP)
    chunk = first // CHUNK + tl.arange(0, BLOCK_K // CHUNK)
    byte = (chunk * _CHUNK_BYTES)[:, None] + tl.arange(0, _CHUNK_BYTES)[None, :]
    p_byte = p_w[:, None, None] + byte[None, :, :]
    if GROUP > 0:
        is_there = chunk < K // CHUNK
        mask = mask_n[:, None] & is_there[None, :]
        p_group = p_scale[:, None] + (chunk * CHUNK // GROUP)[None, :] * (1 + ZEROS)
        scale, zero = scale_and_zero(p_group, mask, ZEROS)
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
