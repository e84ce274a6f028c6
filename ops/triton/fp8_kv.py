"""FP8 (float8_e4m3fn) keys, values and latents in Triton: rounded, and widened in pairs."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_hybrid.ops.triton.fp8 import widen

_LARGEST: tl.constexpr = tl.constexpr(448.0)
_LEAST_NORMAL: tl.constexpr = tl.constexpr(2.0**-6)
# The exponent of float32 is biased by 120 more, which counts from the fourth bit of a number.
_REBIAS_BITS: tl.constexpr = tl.constexpr(120 << 3)
# Added to a float32 below the least normal number, it leaves multiples of 2^-9 in the last bits.
_ROUNDS_SMALL: tl.constexpr = tl.constexpr(2.0**14)
_ROUNDS_SMALL_BITS: tl.constexpr = tl.constexpr(0x46800000)


@triton.jit
def widen_pairs(
    pairs: tl.tensor, dtype: tl.constexpr, CONVERTS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Widen the two FP8 numbers in each int16: return the one in the low byte, and the other.

    CONVERTS: the device has an instruction for it.
    """
    low = (pairs & 0xFF).to(tl.uint8)
    high = (pairs >> 8).to(tl.uint8)
    if CONVERTS:
        low = low.to(tl.float8e4nv, bitcast=True)
        high = high.to(tl.float8e4nv, bitcast=True)
    return widen(low, dtype), widen(high, dtype)


@triton.jit
def narrow(values: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Round float32 to FP8, or to its bits (uint8): to nearest, ties to even.

    Numbers beyond 448, the largest, become 448; NaN stays.
    """
    values = tl.clamp(values, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if dtype == tl.uint8:
        bits = values.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - _REBIAS_BITS
        magnitude = size.to(tl.float32, bitcast=True)
        small = (magnitude + _ROUNDS_SMALL).to(tl.int32, bitcast=True) - _ROUNDS_SMALL_BITS
        number = tl.where(magnitude < _LEAST_NORMAL, small, normal)
        number = tl.where(size > 0x7F800000, 0x7F, number)
        narrowed = (number | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        narrowed = values.to(dtype)
    return narrowed


@triton.jit
def float16_factors(largest: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Choose powers of two that bring rows of BF16 into FP16's range; return them and their
    inverses.

    Two FP8 numbers widen to FP16 in one instruction, to BF16 in five. A row times its factor keeps
    in FP16 every bit but those below 2^-38 of the row's largest number.

    Args:
        largest: the largest absolute value of each row, float32.
    """
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 0xFF, 15)
    factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)  # the largest to [2^14, 2^15)
    return factor, ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def as_float16(rows: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Scale rows of BF16 to FP16; return them and the factor that undoes it in their products."""
    wide = rows.to(tl.float32)
    factor, inverse = float16_factors(tl.max(tl.abs(wide), 1))
    return (wide * factor[:, None]).to(tl.float16), inverse
