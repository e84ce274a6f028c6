"""Decays between the tokens of a chunk, from logarithms that are at most 0, -inf included."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from torch_hybrid.ops.ragged_chunks import FULL_DECAY

_FULL_DECAY: tl.constexpr = tl.constexpr(FULL_DECAY)


LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))
_LOG2_E: tl.constexpr = tl.constexpr(1.44269502162933349609375)  # to float32 precision
_LOG2_E_REST: tl.constexpr = tl.constexpr(math.log2(math.e) - 1.44269502162933349609375)
# A decay of one token of which 16 have integers that do not overflow.
MOST_FIXED: tl.constexpr = tl.constexpr(-11.0)
_LN_2: tl.constexpr = tl.constexpr(math.log(2))


@triton.jit
def exp(x: tl.tensor) -> tl.tensor:
    """Compute ``e^x`` of a finite float32 to float32 precision.

    A GPU has only 2^x, and rounding ``x log2(e)`` costs an error that grows with x. The term that
    rounding dropped is multiplied back.
    """
    x_log2 = x * _LOG2_E
    rest = tl.fma(x, tl.full(x.shape, _LOG2_E, tl.float32), -x_log2) + x * _LOG2_E_REST
    power = tl.exp2(x_log2)
    return power + power * (rest * _LN_2)


@triton.jit
def exp2_of_decay(x: tl.tensor) -> tl.tensor:
    """Compute 2^x of an x <= 0, within one rounding for results near 1: of a state that lasts.

    A GPU's own 2^x is up to two roundings off, which would add up over the tokens of a state.
    """
    series = 0.6931468 + x * (0.24021336 + x * (0.05534397 + x * 0.0088430066))
    return tl.where(x > -0.25, 1.0 + x * series, tl.exp2(x))


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """Compute log(1 + e^x) of a float32 within 1e-7, by a series of atanh that does not cancel."""
    e = exp(-tl.abs(x))
    s = e / (2.0 + e)
    t = s * s
    series = 1.0 / 15
    for i in tl.static_range(7):
        series = series * t + 1.0 / (13 - 2 * i)
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def fixed_decay(g: tl.tensor) -> tl.tensor:
    """Convert a log decay g, at least MOST_FIXED, to fixed point: a log2 in units of 2^-23.

    Sums and differences of integers are exact, also where longer sums overflow.
    """
    return (tl.maximum(g, MOST_FIXED) * (_LOG2_E * 8388608.0) - 0.5).to(tl.int32)


@triton.jit
def fixed_exp(x: tl.tensor) -> tl.tensor:
    """Raise 2 to a fixed-point log2 (``fixed_decay``) between -126 and 126."""
    fraction = ((x & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)  # 1 more than it is
    power = tl.exp2(fraction).to(tl.int32, bitcast=True)
    return (power + (x & -0x800000) - 0x800000).to(tl.float32, bitcast=True)


@triton.jit
def cumulate(g: tl.tensor, axis: tl.constexpr = 0, dtype: tl.constexpr = tl.float64) -> tl.tensor:
    """Sum log decays g along ``axis``, the tokens of a chunk, inclusively.

    The sums are float64: differences of two large ones must keep a small decay between them.
    """
    return tl.cumsum(tl.maximum(g, _FULL_DECAY).to(dtype), axis)


@triton.jit
def decay_since_start(total: tl.tensor) -> tl.tensor:
    """Decay ``[C]`` from before the chunk up to and with each token."""
    return tl.exp(total).to(tl.float32)


@triton.jit
def decay_until_end(total: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Decay ``[C]`` from after each token to the end of the chunk."""
    return tl.exp(_last(total, C) - total).to(tl.float32)


@triton.jit
def decay_of_chunk(total: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Decay of the whole chunk, a scalar."""
    return tl.exp(_last(total, C)).to(tl.float32)


@triton.jit
def decay_between(total: tl.tensor, C: tl.constexpr) -> tl.tensor:
    """Decay ``[C, C]`` from after token j up to and with token i, 0 for i < j.

    A pair of float32 numbers holds a sum; of two pairs the difference is as exact.
    """
    token = tl.arange(0, C)
    high = total.to(tl.float32)
    between = high[:, None] - high[None, :]
    if total.dtype == tl.float64:
        low = (total - high.to(tl.float64)).to(tl.float32)
        between += low[:, None] - low[None, :]
    is_past = token[:, None] >= token[None, :]
    return tl.where(is_past, exp(tl.where(is_past, between, 0.0)), 0.0)


@triton.jit
def _last(total: tl.tensor, C: tl.constexpr) -> tl.tensor:
    return tl.sum(tl.where(tl.arange(0, C) == C - 1, total, 0.0), 0)
