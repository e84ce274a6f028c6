"""Search in the kernels of a draw: weights, their sums, and the least weight that is kept."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from torch_hybrid.ops.triton.devices import interpreted

_INTERPRETED: tl.constexpr = tl.constexpr(interpreted())
LEAST: tl.constexpr = tl.constexpr(0x2B800000)  # bits of the least weight that counts: 2 ** -40
SEGMENT: tl.constexpr = tl.constexpr(2048)  # tokens that a program looks at
_FEW: tl.constexpr = tl.constexpr(64)  # collected weights that are looked at together
_MANY: tl.constexpr = tl.constexpr(1024)


@triton.jit
def in_order(bits: tl.tensor) -> tl.tensor:
    """Turn bits of floats to integers of their order, or back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of(key: tl.tensor) -> tl.tensor:
    """Return the logit in a best token's integer."""
    return in_order((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def best_of(
    best: tl.tensor, row: tl.tensor, S: tl.constexpr, BLOCK_S: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Find the largest logit of a row, and the first token that has it."""
    index = tl.arange(0, BLOCK_S)
    b_key = tl.load(best + row * S + index, mask=index < S, other=-(2**63))
    key = tl.max(b_key, 0)
    return logit_of(key), 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _weight(x: tl.tensor, likeliest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Compute exp((x - likeliest) / temperature), rounded as torch rounds it.

    The division is a double's, and the exponential not the approximate one of ``tl.exp``.
    """
    difference = (x - likeliest).to(tl.float64)
    if _INTERPRETED:
        return tl.exp((difference / temperature).to(tl.float32))
    # The quotient as division rounds it, in three steps with a divisor that all tokens share.
    inverse = 1.0 / tl.maximum(temperature, 1e-300)
    quotient = difference * inverse
    rest = tl.fma(-quotient, temperature, difference)
    refined = tl.fma(rest, inverse, quotient)
    # Where it is too low to be refined, even infinite, the weight is 0 anyway.
    return libdevice.exp(tl.where(quotient > -1000.0, refined, quotient).to(tl.float32))


@triton.jit
def weights_of(
    logits: tl.tensor,
    token: tl.tensor,
    likeliest: tl.tensor,
    temperature: tl.tensor,
    V: tl.constexpr,
) -> tl.tensor:
    """Weigh tokens of one row; 0 beyond its end."""
    b_x = tl.load(logits + token, mask=token < V, other=-float("inf")).to(tl.float32)
    return _weight(b_x, likeliest, temperature)


@triton.jit
def counts_of(b_w: tl.tensor) -> tl.tensor:
    """Count weights like ``counts.as_counts``."""
    return (b_w * 1099511627776.0).to(tl.int64)


@triton.jit
def nucleus_mass(total: tl.tensor, top_p: tl.tensor) -> tl.tensor:
    """Return the least count like ``counts.nucleus_mass``."""
    return tl.minimum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), total)


@triton.jit
def wants_nucleus(settings: tl.tensor, row: tl.tensor, num_rows: tl.tensor) -> tl.tensor:
    """Tell whether a token is drawn of a row by a top-p without a top-k."""
    top_k = tl.load(settings + 2 * num_rows + row)
    top_p = tl.load(settings + 3 * num_rows + row)
    return (tl.load(settings + row) > 0) & (top_k == 0) & (top_p < 1)


@triton.jit
def bits_of_min_p(settings: tl.tensor, row: tl.tensor, num_rows: tl.tensor) -> tl.tensor:
    """Return the bits of the least weight that min-p keeps: it is a double, weights are floats."""
    min_p = tl.load(settings + 4 * num_rows + row)
    rounded = min_p.to(tl.float32)
    return rounded.to(tl.int32, bitcast=True) + (rounded.to(tl.float64) < min_p).to(tl.int32)


@triton.jit
def kept_from(
    settings: tl.tensor,
    least: tl.tensor,
    row: tl.tensor,
    num_rows: tl.tensor,
    FILTERS: tl.constexpr,
) -> tl.tensor:
    """Return the bits of the least weight kept, by min-p too."""
    threshold = bits_of_min_p(settings, row, num_rows)
    if FILTERS:
        threshold = tl.maximum(threshold, tl.load(least + row))
    return threshold


@triton.jit
def least_of_ranked(
    blocks: tl.tensor,
    top_k: tl.tensor,
    likeliest: tl.tensor,
    temperature: tl.tensor,
    B: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> tl.tensor:
    """Return the bits of a weight that the k-th largest of a row is at least.

    The k largest maxima of blocks are k tokens. With more than there are blocks it is 0.
    """
    index = tl.arange(0, BLOCK_B)
    b_order = tl.load(blocks + index, mask=index < B, other=-(2**31))
    # Of 28 bits, so that none is a sign; what is cut off makes the bound a little lower.
    b_key = (b_order >> 4) + (1 << 27)
    bound = _largest_of(b_key, tl.minimum(top_k, B + 1.0).to(tl.int32))
    logit = in_order((bound - (1 << 27)) << 4).to(tl.float32, bitcast=True)
    logit = tl.where(logit == logit, logit, -float("inf"))
    return _weight(logit, likeliest, temperature).to(tl.int32, bitcast=True)


@triton.jit
def _largest_of(b_key: tl.tensor, k: tl.tensor) -> tl.tensor:
    """Find the k-th largest of integers of 28 bits, 4 at a time; 0 where there are fewer."""
    digit = tl.arange(0, 16)
    found = 0
    for i in tl.static_range(7):
        candidate = found | (digit << (24 - 4 * i))
        num_at_least = tl.sum((b_key[None, :] >= candidate[:, None]).to(tl.int32), 1)
        found |= tl.maximum(tl.sum((num_at_least >= k).to(tl.int32), 0) - 1, 0) << (24 - 4 * i)
    return found


@triton.jit
def floor_of(threshold: tl.tensor, likeliest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Return a logit that all of at least this weight, by its bits, are above; a little too low."""
    scaled = tl.log(threshold.to(tl.float32, bitcast=True)) * temperature.to(tl.float32)
    slack = 1e-5 * (tl.abs(likeliest) + tl.abs(scaled) + temperature.to(tl.float32))
    logit = likeliest + scaled - slack
    return tl.where(logit == logit, logit, -float("inf"))


@triton.jit
def search_least(
    weights: tl.tensor,
    size: tl.tensor,
    wanted: tl.tensor,
    lowest: tl.tensor,
    highest: tl.tensor,
    MASS: tl.constexpr,
) -> tl.tensor:
    """Find the largest bits of which there are ``wanted`` of at least them, within the bounds.

    Wanted are weights, or with MASS counts; bits are as small as can be where there are fewer.
    """
    if size <= _FEW:
        found = _search_few(weights, size, wanted, MASS)
    else:
        found = _search_digits(weights, size, wanted, lowest, highest, MASS)
    return found


@triton.jit
def _search_few(
    weights: tl.tensor, size: tl.tensor, wanted: tl.tensor, MASS: tl.constexpr
) -> tl.tensor:
    """Search among few: each is compared with each, at once."""
    index = tl.arange(0, _FEW)
    b_bits = tl.load(weights + index, mask=index < size, other=-1)
    b_value = tl.where(b_bits >= 0, 1, 0)
    if MASS:
        b_value = counts_of(tl.maximum(b_bits, 0).to(tl.float32, bitcast=True))
    reaches = b_bits[None, :] >= b_bits[:, None]
    b_sum = tl.sum(tl.where(reaches, b_value[None, :], 0), 1)
    return tl.maximum(tl.max(tl.where(b_sum >= wanted, b_bits, 0), 0), 0)


@triton.jit
def _search_digits(
    weights: tl.tensor,
    size: tl.tensor,
    wanted: tl.tensor,
    lowest: tl.tensor,
    highest: tl.tensor,
    MASS: tl.constexpr,
) -> tl.tensor:
    """Search among many, three bits at a time."""
    digit = tl.arange(0, 8)
    found = lowest
    shift = tl.zeros((), tl.int32)
    while (highest - lowest) >> shift > 7:
        shift += 3
    while shift >= 0:
        candidate = found + (digit << shift)
        b_sum = tl.zeros((8,), tl.int64)
        for start in range(0, size, _MANY):
            index = start + tl.arange(0, _MANY)
            b_bits = tl.load(weights + index, mask=index < size, other=-1)
            b_value = tl.where(b_bits >= 0, 1, 0)
            if MASS:
                b_value = counts_of(tl.maximum(b_bits, 0).to(tl.float32, bitcast=True))
            reaches = b_bits[None, :] >= candidate[:, None]
            b_sum += tl.sum(tl.where(reaches, b_value[None, :], 0), 1)
        found += tl.maximum(tl.sum((b_sum >= wanted).to(tl.int32), 0) - 1, 0) << shift
        shift -= 3
    return found


@triton.jit
def sum_from(weights: tl.tensor, size: tl.tensor, threshold: tl.tensor) -> tl.tensor:
    """Add up what all weights of at least these bits count."""
    total = tl.zeros((), tl.int64)
    for start in range(0, size, _MANY):
        index = start + tl.arange(0, _MANY)
        b_bits = tl.load(weights + index, mask=index < size, other=0)
        b_count = counts_of(b_bits.to(tl.float32, bitcast=True))
        total += tl.sum(tl.where(b_bits >= threshold, b_count, 0), 0)
    return total


@triton.jit
def add_to_segments(
    weights: tl.tensor,
    segments: tl.tensor,
    size: tl.tensor,
    threshold: tl.tensor,
    masses: tl.tensor,
) -> None:
    """Add what weights of at least these bits count to the masses of their segments."""
    for start in range(0, size, _MANY):
        index = start + tl.arange(0, _MANY)
        b_bits = tl.load(weights + index, mask=index < size, other=-1)
        b_segment = tl.load(segments + index, mask=index < size, other=0)
        b_count = counts_of(tl.maximum(b_bits, 0).to(tl.float32, bitcast=True))
        is_kept = (b_bits >= threshold) & (b_bits >= 0)
        tl.atomic_add(masses + b_segment, b_count, mask=is_kept, sem="relaxed")
