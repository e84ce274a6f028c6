# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton": thresholds are searched, nothing is sorted; see the README.

best       of each segment of a row, and of each of its blocks where there is a top-k
histogram  of the counts by weight, where a top-p has no top-k
bounds     of the weights between which a row's last kept token is
collect    the weights within them
threshold  the least weight that is kept, among those
masses     of what is kept, by segments
draw       the segment in which the running sum passes the number, and the token in it
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from torch_hybrid.ops.triton.devices import interpreted

_INTERPRETED: tl.constexpr = tl.constexpr(interpreted())
_SEGMENT: tl.constexpr = tl.constexpr(2048)  # tokens that a program looks at
_BLOCKS = (128, 512)  # tokens whose largest logit bounds a top-k: shorter ones bound it better
_LEAST: tl.constexpr = tl.constexpr(0x2B800000)  # bits of the least weight that counts: 2 ** -40
_BIN_SIZE: tl.constexpr = tl.constexpr(1 << 18)
_NUM_BINS: tl.constexpr = tl.constexpr(2048)  # enough for weights up to 1
_BIN_BITS: tl.constexpr = tl.constexpr(18)
_FEW: tl.constexpr = tl.constexpr(64)  # collected weights that are looked at together
_MANY: tl.constexpr = tl.constexpr(1024)


def draw_tokens(
    logits: Tensor, settings: Tensor, *, draws: bool, num_ranked: int, has_wide_top_p: bool
) -> Tensor:
    """Launcher of ``torch_hybrid::draw_tokens``."""
    num_rows, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    if not num_rows:
        return tokens
    settings = settings.contiguous()
    num_segments = triton.cdiv(vocab, _SEGMENT.value)
    by_segment, by_row = (num_rows * num_segments,), (num_rows,)
    best = logits.new_empty(num_rows, num_segments, dtype=torch.int64)
    block = _BLOCKS[num_ranked * 4 * _BLOCKS[1] <= vocab]
    num_blocks = num_segments * (_SEGMENT.value // block)
    blocks = logits.new_empty((num_rows, num_blocks) if num_ranked else (1,), dtype=torch.int32)
    row = {"V": vocab, "S": num_segments, "BLOCK_S": triton.next_power_of_2(num_segments)}
    _best_kernel[by_segment](
        logits,
        best,
        blocks,
        logits.stride(0),
        **row,
        BLOCK=block,
        RANKS=num_ranked > 0,
        num_warps=4,
    )
    masses = torch.empty_like(best) if draws else best
    least = logits.new_empty(num_rows, dtype=torch.int32)
    floor = logits.new_empty(num_rows, dtype=torch.float32)  # below it no logit can be kept
    filters = draws and (num_ranked > 0 or has_wide_top_p)
    if filters:
        # The last weight kept is at least `low` and at most `high`, and `wanted` of what lies
        # between is.
        low, high, found = logits.new_empty((3, num_rows), dtype=torch.int32)
        wanted = logits.new_empty(num_rows, dtype=torch.int64)
        histogram = blocks
        if has_wide_top_p:
            histogram = logits.new_zeros((num_rows, _NUM_BINS.value), dtype=torch.int64)
            _histogram_kernel[by_segment](
                logits, settings, best, histogram, num_rows, logits.stride(0), **row, num_warps=4
            )
        _bounds_kernel[by_row](
            settings,
            best,
            blocks,
            histogram,
            floor,
            low,
            high,
            wanted,
            found,
            num_rows,
            **row,
            B=num_blocks,
            BLOCK_B=triton.next_power_of_2(num_blocks),
            RANKS=num_ranked > 0,
            WIDE=has_wide_top_p,
            num_warps=4,
        )
        weights = logits.new_empty((num_rows, vocab), dtype=torch.int32)
        _collect_kernel[by_segment](
            logits,
            settings,
            best,
            floor,
            low,
            high,
            found,
            weights,
            num_rows,
            logits.stride(0),
            **row,
            num_warps=4,
        )
        _threshold_kernel[by_row](
            settings,
            best,
            wanted,
            found,
            weights,
            low,
            least,
            floor,
            num_rows,
            **row,
            num_warps=4,
        )
    if draws:
        _masses_kernel[by_segment](
            logits,
            settings,
            best,
            least,
            floor,
            masses,
            num_rows,
            logits.stride(0),
            **row,
            FILTERS=filters,
            num_warps=4,
        )
    _draw_kernel[by_row](
        logits,
        settings,
        best,
        least,
        masses,
        tokens,
        num_rows,
        logits.stride(0),
        **row,
        DRAWS=draws,
        FILTERS=filters,
        num_warps=4,
    )
    return tokens


@triton.jit(do_not_specialize=["stride"])
def _best_kernel(
    logits: tl.tensor,
    best: tl.tensor,
    blocks: tl.tensor,
    stride: tl.tensor,
    V: tl.constexpr,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
) -> None:
    """One program: a segment. Its best token as one integer: its logit above, in an order of
    integers, and below its id, counted from the end, so that the first of equal ones is larger."""
    NUM_BLOCKS: tl.constexpr = _SEGMENT // BLOCK
    row = (tl.program_id(0) // S).to(tl.int64)
    segment = tl.program_id(0) % S
    block = tl.arange(0, NUM_BLOCKS)
    token = segment * _SEGMENT + block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = token < V
    b_x = tl.load(logits + row * stride + token, mask=inside, other=0.0).to(tl.float32)
    b_x += 0.0  # -0 is 0
    b_order = tl.where(b_x != b_x, 0x7FFFFFFF, _in_order(b_x.to(tl.int32, bitcast=True)))
    b_order = tl.where(inside, b_order, -(2**31))
    b_best = tl.max(b_order, 1)
    order = tl.max(b_best, 0)
    first = tl.min(tl.min(tl.where(b_order == order, token, 0x7FFFFFFF), 1), 0)
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - first).to(tl.int64)
    tl.store(best + row * S + segment, key)
    if RANKS:
        tl.store(blocks + row * S * NUM_BLOCKS + segment * NUM_BLOCKS + block, b_best)


@triton.jit(do_not_specialize=["num_rows", "stride"])
def _histogram_kernel(
    logits: tl.tensor,
    settings: tl.tensor,
    best: tl.tensor,
    histogram: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    V: tl.constexpr,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """One program: adds a segment's counts to its row's, by the upper bits of their weights."""
    row = (tl.program_id(0) // S).to(tl.int64)
    temperature = tl.load(settings + row)
    top_k = tl.load(settings + 2 * num_rows + row)
    top_p = tl.load(settings + 3 * num_rows + row)
    likeliest, _ = _best_of(best, row, S, BLOCK_S)
    if (temperature > 0) & (top_k == 0) & (top_p < 1) & (tl.abs(likeliest) < float("inf")):
        token = (tl.program_id(0) % S) * _SEGMENT + tl.arange(0, _SEGMENT)
        b_w = _weights(logits + row * stride, token, likeliest, temperature, V)
        b_count = _counts(b_w)
        b_bin = (b_w.to(tl.int32, bitcast=True) - _LEAST) // _BIN_SIZE
        place = histogram + row * _NUM_BINS + b_bin
        tl.atomic_add(place, b_count, mask=b_count > 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def _bounds_kernel(
    settings: tl.tensor,
    best: tl.tensor,
    blocks: tl.tensor,
    histogram: tl.tensor,
    floor: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    wanted: tl.tensor,
    found: tl.tensor,
    num_rows: tl.tensor,
    V: tl.constexpr,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
    B: tl.constexpr,
    BLOCK_B: tl.constexpr,
    RANKS: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One program: a row."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(settings + row)
    top_k = tl.load(settings + 2 * num_rows + row)
    top_p = tl.load(settings + 3 * num_rows + row)
    likeliest, _ = _best_of(best, row, S, BLOCK_S)
    draws = (temperature > 0) & (tl.abs(likeliest) < float("inf"))
    lowest = 0x7FFFFFFF
    highest = 0x7FFFFFFF
    least = float("inf")  # nothing is collected
    rest = tl.zeros((), tl.int64)
    if RANKS:
        has_rank = draws & (top_k > 0)
        if has_rank:
            lowest = _least_of_ranked(blocks + row * B, top_k, likeliest, temperature, B, BLOCK_B)
            rest = top_k.to(tl.int64)
    if WIDE:
        is_wide = draws & (top_k == 0) & (top_p < 1)
        if is_wide:
            lowest, rest = _nucleus_bin(histogram + row * _NUM_BINS, top_p)
            highest = lowest + _BIN_SIZE - 1
    if lowest < 0x7FFFFFFF:
        least = _floor_of(lowest, likeliest, temperature)
    tl.store(floor + row, least)
    tl.store(low + row, lowest)
    tl.store(high + row, highest)
    tl.store(wanted + row, rest)
    tl.store(found + row, 0)


@triton.jit(do_not_specialize=["num_rows", "stride"])
def _collect_kernel(
    logits: tl.tensor,
    settings: tl.tensor,
    best: tl.tensor,
    floor: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    found: tl.tensor,
    weights: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    V: tl.constexpr,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """One program: appends those of a segment's weights that are within the bounds, in any
    order."""
    row = (tl.program_id(0) // S).to(tl.int64)
    segment = tl.program_id(0) % S
    own = _logit_of(tl.load(best + row * S + segment))
    if own >= tl.load(floor + row):
        lowest = tl.load(low + row)
        highest = tl.load(high + row)
        temperature = tl.load(settings + row)
        likeliest, _ = _best_of(best, row, S, BLOCK_S)
        token = segment * _SEGMENT + tl.arange(0, _SEGMENT)
        b_w = _weights(logits + row * stride, token, likeliest, temperature, V)
        b_bits = b_w.to(tl.int32, bitcast=True)
        keep = (b_bits >= lowest) & (b_bits <= highest) & (token < V)
        b_place = tl.cumsum(keep.to(tl.int32), 0)
        first = tl.atomic_add(found + row, tl.max(b_place, 0))
        tl.store(weights + row * V + first + b_place - 1, b_bits, mask=keep)


@triton.jit(do_not_specialize=["num_rows"])
def _threshold_kernel(
    settings: tl.tensor,
    best: tl.tensor,
    wanted: tl.tensor,
    found: tl.tensor,
    weights: tl.tensor,
    low: tl.tensor,
    least: tl.tensor,
    floor: tl.tensor,
    num_rows: tl.tensor,
    V: tl.constexpr,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """One program: a row. The bits of its least weight kept by top-k and top-p; 0 keeps all."""
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(settings + 2 * num_rows + row)
    top_p = tl.load(settings + 3 * num_rows + row)
    size = tl.load(found + row)
    mass = tl.load(wanted + row)
    own = weights + row * V
    threshold = tl.zeros((), tl.int32)
    logit = -float("inf")
    if size > 0:
        if top_k > 0:
            threshold = _search(own, size, mass, tl.zeros((), tl.int32), 30, False)
            if top_p < 1:
                mass = _nucleus_mass(_sum_from(own, size, threshold), top_p)
                threshold = _search(own, size, mass, tl.zeros((), tl.int32), 30, True)
        else:
            threshold = _search(own, size, mass, tl.load(low + row), _BIN_BITS, True)
        likeliest, _ = _best_of(best, row, S, BLOCK_S)
        logit = _floor_of(threshold, likeliest, tl.load(settings + row))
    tl.store(least + row, threshold)
    tl.store(floor + row, logit)


@triton.jit(do_not_specialize=["num_rows", "stride"])
def _masses_kernel(
    logits: tl.tensor,
    settings: tl.tensor,
    best: tl.tensor,
    least: tl.tensor,
    floor: tl.tensor,
    masses: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    V: tl.constexpr,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
    FILTERS: tl.constexpr,
) -> None:
    """One program: what a segment's kept tokens count together."""
    row = (tl.program_id(0) // S).to(tl.int64)
    segment = tl.program_id(0) % S
    temperature = tl.load(settings + row)
    has_kept = temperature > 0
    if FILTERS:
        own = _logit_of(tl.load(best + row * S + segment))
        has_kept = has_kept & (own >= tl.load(floor + row))
    mass = tl.zeros((), tl.int64)
    if has_kept:
        likeliest, _ = _best_of(best, row, S, BLOCK_S)
        threshold = _threshold(settings, least, row, num_rows, FILTERS)
        token = segment * _SEGMENT + tl.arange(0, _SEGMENT)
        b_w = _weights(logits + row * stride, token, likeliest, temperature, V)
        kept = b_w.to(tl.int32, bitcast=True) >= threshold
        mass = tl.sum(tl.where(kept, _counts(b_w), 0), 0)
    tl.store(masses + row * S + segment, mass)


@triton.jit(do_not_specialize=["num_rows", "stride"])
def _draw_kernel(
    logits: tl.tensor,
    settings: tl.tensor,
    best: tl.tensor,
    least: tl.tensor,
    masses: tl.tensor,
    tokens: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    V: tl.constexpr,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DRAWS: tl.constexpr,
    FILTERS: tl.constexpr,
) -> None:
    """One program: a row."""
    row = tl.program_id(0).to(tl.int64)
    likeliest, chosen = _best_of(best, row, S, BLOCK_S)
    is_finite = tl.abs(likeliest) < float("inf")
    if DRAWS:
        temperature = tl.load(settings + row)
        if (temperature > 0) & is_finite:
            number = tl.load(settings + num_rows + row)
            threshold = _threshold(settings, least, row, num_rows, FILTERS)
            index = tl.arange(0, BLOCK_S)
            b_mass = tl.load(masses + row * S + index, mask=index < S, other=0)
            total = tl.sum(b_mass, 0)
            target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
            passed = tl.cumsum(b_mass, 0) <= target
            segment = tl.sum(passed.to(tl.int32), 0)
            target -= tl.sum(tl.where(passed, b_mass, 0), 0)
            token = segment * _SEGMENT + tl.arange(0, _SEGMENT)
            b_w = _weights(logits + row * stride, token, likeliest, temperature, V)
            kept = b_w.to(tl.int32, bitcast=True) >= threshold
            b_reached = tl.cumsum(tl.where(kept, _counts(b_w), 0), 0)
            chosen = segment * _SEGMENT + tl.sum((b_reached <= target).to(tl.int32), 0)
    tl.store(tokens + row, tl.where(is_finite, chosen, -1).to(tl.int64))


@triton.jit
def _in_order(bits: tl.tensor) -> tl.tensor:
    """Bits of floats to integers of their order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit_of(key: tl.tensor) -> tl.tensor:
    """The logit in a best token's integer."""
    return _in_order((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _best_of(
    best: tl.tensor, row: tl.tensor, S: tl.constexpr, BLOCK_S: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The largest logit of a row, and the first token that has it."""
    index = tl.arange(0, BLOCK_S)
    b_key = tl.load(best + row * S + index, mask=index < S, other=-(2**63))
    key = tl.max(b_key, 0)
    return _logit_of(key), 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _weight(x: tl.tensor, likeliest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """exp((x - likeliest) / temperature), rounded as torch rounds it: the division is a double's,
    and the exponential not the approximate one of ``tl.exp``."""
    scaled = ((x - likeliest).to(tl.float64) / temperature).to(tl.float32)
    if _INTERPRETED:
        return tl.exp(scaled)
    return libdevice.exp(scaled)


@triton.jit
def _weights(
    logits: tl.tensor,
    token: tl.tensor,
    likeliest: tl.tensor,
    temperature: tl.tensor,
    V: tl.constexpr,
) -> tl.tensor:
    """Of tokens of one row; 0 beyond its end."""
    b_x = tl.load(logits + token, mask=token < V, other=-float("inf")).to(tl.float32)
    return _weight(b_x, likeliest, temperature)


@triton.jit
def _counts(b_w: tl.tensor) -> tl.tensor:
    """As ``counts.as_counts``."""
    return (b_w * 1099511627776.0).to(tl.int64)


@triton.jit
def _nucleus_mass(total: tl.tensor, top_p: tl.tensor) -> tl.tensor:
    """As ``counts.nucleus_mass``."""
    return tl.minimum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), total)


@triton.jit
def _threshold(
    settings: tl.tensor,
    least: tl.tensor,
    row: tl.tensor,
    num_rows: tl.tensor,
    FILTERS: tl.constexpr,
) -> tl.tensor:
    """Bits of the least weight kept, by min-p too: it is a double, weights are floats."""
    min_p = tl.load(settings + 4 * num_rows + row)
    rounded = min_p.to(tl.float32)
    threshold = rounded.to(tl.int32, bitcast=True)
    threshold += (rounded.to(tl.float64) < min_p).to(tl.int32)
    if FILTERS:
        threshold = tl.maximum(threshold, tl.load(least + row))
    return threshold


@triton.jit
def _least_of_ranked(
    blocks: tl.tensor,
    top_k: tl.tensor,
    likeliest: tl.tensor,
    temperature: tl.tensor,
    B: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> tl.tensor:
    """Bits of a weight that the k-th largest of a row is at least: the k largest maxima of blocks
    are k tokens. With more than there are blocks it is 0."""
    index = tl.arange(0, BLOCK_B)
    b_order = tl.load(blocks + index, mask=index < B, other=-(2**31))
    # Of 28 bits, so that none is a sign; what is cut off makes the bound a little lower.
    b_key = (b_order >> 4) + (1 << 27)
    bound = _largest_of(b_key, tl.minimum(top_k, B + 1.0).to(tl.int32))
    logit = _in_order((bound - (1 << 27)) << 4).to(tl.float32, bitcast=True)
    logit = tl.where(logit == logit, logit, -float("inf"))
    return _weight(logit, likeliest, temperature).to(tl.int32, bitcast=True)


@triton.jit
def _nucleus_bin(histogram: tl.tensor, top_p: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The bin in which a row's nucleus ends: bits of its least weight, and what is wanted of it."""
    index = tl.arange(0, _NUM_BINS)
    b_mass = tl.load(histogram + index)
    mass = _nucleus_mass(tl.sum(b_mass, 0), top_p)
    b_from_here = tl.cumsum(b_mass, 0, reverse=True)
    last = tl.sum((b_from_here >= mass).to(tl.int32), 0) - 1
    return last * _BIN_SIZE + _LEAST, mass - tl.sum(tl.where(index > last, b_mass, 0), 0)


@triton.jit
def _largest_of(b_key: tl.tensor, k: tl.tensor) -> tl.tensor:
    """The k-th largest of integers of 28 bits, 4 of them at a time; 0 where there are fewer."""
    digit = tl.arange(0, 16)
    found = 0
    for i in tl.static_range(7):
        candidate = found | (digit << (24 - 4 * i))
        num_at_least = tl.sum((b_key[None, :] >= candidate[:, None]).to(tl.int32), 1)
        found |= tl.maximum(tl.sum((num_at_least >= k).to(tl.int32), 0) - 1, 0) << (24 - 4 * i)
    return found


@triton.jit
def _floor_of(threshold: tl.tensor, likeliest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """A logit that all of at least this weight, by its bits, are above; a little too low."""
    scaled = tl.log(threshold.to(tl.float32, bitcast=True)) * temperature.to(tl.float32)
    slack = 1e-5 * (tl.abs(likeliest) + tl.abs(scaled) + temperature.to(tl.float32))
    logit = likeliest + scaled - slack
    return tl.where(logit == logit, logit, -float("inf"))


@triton.jit
def _search(
    weights: tl.tensor,
    size: tl.tensor,
    wanted: tl.tensor,
    found: tl.tensor,
    BITS: tl.constexpr,
    MASS: tl.constexpr,
) -> tl.tensor:
    """The largest bits of which there are ``wanted`` of at least them: weights, or with MASS
    counts; as small as can be where there are fewer. Their upper bits are those of ``found``."""
    if size <= _FEW:
        found = _search_few(weights, size, wanted, MASS)
    else:
        found = _search_digits(weights, size, wanted, found, BITS, MASS)
    return found


@triton.jit
def _search_few(
    weights: tl.tensor, size: tl.tensor, wanted: tl.tensor, MASS: tl.constexpr
) -> tl.tensor:
    """The same among few: each is compared with each, at once."""
    index = tl.arange(0, _FEW)
    b_bits = tl.load(weights + index, mask=index < size, other=-1)
    b_value = tl.where(b_bits >= 0, 1, 0)
    if MASS:
        b_value = _counts(tl.maximum(b_bits, 0).to(tl.float32, bitcast=True))
    reaches = b_bits[None, :] >= b_bits[:, None]
    b_sum = tl.sum(tl.where(reaches, b_value[None, :], 0), 1)
    return tl.maximum(tl.max(tl.where(b_sum >= wanted, b_bits, 0), 0), 0)


@triton.jit
def _search_digits(
    weights: tl.tensor,
    size: tl.tensor,
    wanted: tl.tensor,
    found: tl.tensor,
    BITS: tl.constexpr,
    MASS: tl.constexpr,
) -> tl.tensor:
    """The same among many, three bits at a time."""
    digit = tl.arange(0, 8)
    for i in range(BITS // 3):
        shift = BITS - 3 * (i + 1)
        candidate = found + (digit << shift)
        b_sum = tl.zeros((8,), tl.int64)
        for start in range(0, size, _MANY):
            index = start + tl.arange(0, _MANY)
            b_bits = tl.load(weights + index, mask=index < size, other=-1)
            b_value = tl.where(b_bits >= 0, 1, 0)
            if MASS:
                b_value = _counts(tl.maximum(b_bits, 0).to(tl.float32, bitcast=True))
            reaches = b_bits[None, :] >= candidate[:, None]
            b_sum += tl.sum(tl.where(reaches, b_value[None, :], 0), 1)
        found += tl.maximum(tl.sum((b_sum >= wanted).to(tl.int32), 0) - 1, 0) << shift
    return found


@triton.jit
def _sum_from(weights: tl.tensor, size: tl.tensor, threshold: tl.tensor) -> tl.tensor:
    """What all weights of at least these bits count together."""
    total = tl.zeros((), tl.int64)
    for start in range(0, size, _MANY):
        index = start + tl.arange(0, _MANY)
        b_bits = tl.load(weights + index, mask=index < size, other=0)
        b_count = _counts(b_bits.to(tl.float32, bitcast=True))
        total += tl.sum(tl.where(b_bits >= threshold, b_count, 0), 0)
    return total
