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

from torch_hybrid.ops.draw_tokens._triton_search import (
    BIN_SIZE,
    LEAST,
    NUM_BINS,
    best_of,
    counts_of,
    floor_of,
    in_order,
    kept_from,
    least_of_ranked,
    logit_of,
    nucleus_bin,
    nucleus_mass,
    search_least,
    sum_from,
    weights_of,
)

_SEGMENT: tl.constexpr = tl.constexpr(2048)  # tokens that a program looks at
_BLOCKS = (128, 512)  # tokens whose largest logit bounds a top-k: shorter ones bound it better
_BIN_BITS: tl.constexpr = tl.constexpr(18)


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
            histogram = logits.new_zeros((num_rows, NUM_BINS.value), dtype=torch.int64)
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
    b_order = tl.where(b_x != b_x, 0x7FFFFFFF, in_order(b_x.to(tl.int32, bitcast=True)))
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
    likeliest, _ = best_of(best, row, S, BLOCK_S)
    if (temperature > 0) & (top_k == 0) & (top_p < 1) & (tl.abs(likeliest) < float("inf")):
        token = (tl.program_id(0) % S) * _SEGMENT + tl.arange(0, _SEGMENT)
        b_w = weights_of(logits + row * stride, token, likeliest, temperature, V)
        b_count = counts_of(b_w)
        b_bin = (b_w.to(tl.int32, bitcast=True) - LEAST) // BIN_SIZE
        place = histogram + row * NUM_BINS + b_bin
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
    likeliest, _ = best_of(best, row, S, BLOCK_S)
    draws = (temperature > 0) & (tl.abs(likeliest) < float("inf"))
    lowest = 0x7FFFFFFF
    highest = 0x7FFFFFFF
    least = float("inf")  # nothing is collected
    rest = tl.zeros((), tl.int64)
    if RANKS:
        has_rank = draws & (top_k > 0)
        if has_rank:
            lowest = least_of_ranked(blocks + row * B, top_k, likeliest, temperature, B, BLOCK_B)
            rest = top_k.to(tl.int64)
    if WIDE:
        is_wide = draws & (top_k == 0) & (top_p < 1)
        if is_wide:
            lowest, rest = nucleus_bin(histogram + row * NUM_BINS, top_p)
            highest = lowest + BIN_SIZE - 1
    if lowest < 0x7FFFFFFF:
        least = floor_of(lowest, likeliest, temperature)
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
    own = logit_of(tl.load(best + row * S + segment))
    if own >= tl.load(floor + row):
        lowest = tl.load(low + row)
        highest = tl.load(high + row)
        temperature = tl.load(settings + row)
        likeliest, _ = best_of(best, row, S, BLOCK_S)
        token = segment * _SEGMENT + tl.arange(0, _SEGMENT)
        b_w = weights_of(logits + row * stride, token, likeliest, temperature, V)
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
            threshold = search_least(own, size, mass, tl.zeros((), tl.int32), 30, False)
            if top_p < 1:
                mass = nucleus_mass(sum_from(own, size, threshold), top_p)
                threshold = search_least(own, size, mass, tl.zeros((), tl.int32), 30, True)
        else:
            threshold = search_least(own, size, mass, tl.load(low + row), _BIN_BITS, True)
        likeliest, _ = best_of(best, row, S, BLOCK_S)
        logit = floor_of(threshold, likeliest, tl.load(settings + row))
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
        own = logit_of(tl.load(best + row * S + segment))
        has_kept = has_kept & (own >= tl.load(floor + row))
    mass = tl.zeros((), tl.int64)
    if has_kept:
        likeliest, _ = best_of(best, row, S, BLOCK_S)
        threshold = kept_from(settings, least, row, num_rows, FILTERS)
        token = segment * _SEGMENT + tl.arange(0, _SEGMENT)
        b_w = weights_of(logits + row * stride, token, likeliest, temperature, V)
        kept = b_w.to(tl.int32, bitcast=True) >= threshold
        mass = tl.sum(tl.where(kept, counts_of(b_w), 0), 0)
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
    likeliest, chosen = best_of(best, row, S, BLOCK_S)
    is_finite = tl.abs(likeliest) < float("inf")
    if DRAWS:
        temperature = tl.load(settings + row)
        if (temperature > 0) & is_finite:
            number = tl.load(settings + num_rows + row)
            threshold = kept_from(settings, least, row, num_rows, FILTERS)
            index = tl.arange(0, BLOCK_S)
            b_mass = tl.load(masses + row * S + index, mask=index < S, other=0)
            total = tl.sum(b_mass, 0)
            target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
            passed = tl.cumsum(b_mass, 0) <= target
            segment = tl.sum(passed.to(tl.int32), 0)
            target -= tl.sum(tl.where(passed, b_mass, 0), 0)
            token = segment * _SEGMENT + tl.arange(0, _SEGMENT)
            b_w = weights_of(logits + row * stride, token, likeliest, temperature, V)
            kept = b_w.to(tl.int32, bitcast=True) >= threshold
            b_reached = tl.cumsum(tl.where(kept, counts_of(b_w), 0), 0)
            chosen = segment * _SEGMENT + tl.sum((b_reached <= target).to(tl.int32), 0)
    tl.store(tokens + row, tl.where(is_finite, chosen, -1).to(tl.int64))
