"""Implementation "triton": thresholds are searched, nothing is sorted; see the README.

best       of each segment of a row; of each of its blocks where there is a top-k.
narrow     a bracket of the weight at which a nucleus ends, where a top-p has no top-k.
bounds     of the weights between which a row's last kept token is.
collect    the weights within them.
threshold  the least weight that is kept, among those.
masses     of what is kept, by segments.
draw       the segment in which the running sum passes the number, and the token in it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.draw_tokens._triton_nucleus import end_of_nucleus, narrow
from torch_hybrid.ops.draw_tokens._triton_search import (
    SEGMENT,
    add_to_segments,
    best_of,
    bits_of_min_p,
    counts_of,
    floor_of,
    in_order,
    kept_from,
    least_of_ranked,
    logit_of,
    nucleus_mass,
    search_least,
    sum_from,
    wants_nucleus,
    weights_of,
)
from torch_hybrid.ops.draw_tokens.op import DrawTokens
from torch_hybrid.ops.triton.launch import launch

_BLOCKS = (128, 512)  # tokens whose largest logit bounds a top-k: shorter ones bound it better


def draw_tokens(x: DrawTokens) -> Tensor:
    """Launch a kernel for each of the steps above that the options ask for."""
    num_rows, vocab = x.logits.shape
    logits = x.logits if x.logits.stride(1) == 1 else x.logits.contiguous()
    draws, num_ranked, has_wide_top_p = x.draws, x.num_ranked, x.has_wide_top_p
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    if not num_rows:
        return tokens
    settings = x.settings.contiguous()
    num_segments = triton.cdiv(vocab, SEGMENT.value)
    by_segment, by_row = (num_rows * num_segments,), (num_rows,)
    best = logits.new_empty(num_rows, num_segments, dtype=torch.int64)
    block = _BLOCKS[num_ranked * 4 * _BLOCKS[1] <= vocab]
    num_blocks = num_segments * (SEGMENT.value // block)
    blocks = logits.new_empty((num_rows, num_blocks) if num_ranked else (1,), dtype=torch.int32)
    filters = draws and (num_ranked > 0 or has_wide_top_p)
    held = {
        "logits": logits,
        "settings": settings,
        "best": best,
        "blocks": blocks,
        "masses": torch.empty_like(best) if draws else best,
        "least": logits.new_empty(num_rows, dtype=torch.int32),
        "tokens": tokens,
        "num_rows": num_rows,
        "stride": logits.stride(0),
        "V": vocab,
        "S": num_segments,
        "BLOCK_S": triton.next_power_of_2(num_segments),
        "RANKS": num_ranked > 0,
        "WIDE": has_wide_top_p,
        "DRAWS": draws,
        "FILTERS": filters,
    }
    launch(_best_kernel, by_segment, held, BLOCK=block, num_warps=4)
    # The largest logit, and that below which none can be kept.
    held["largest"], held["floor"] = logits.new_empty((2, num_rows), dtype=torch.float32)
    if filters:
        # The last weight kept is at least `low` and at most `high`.
        for name in ("low", "high", "found"):
            held[name] = logits.new_empty(num_rows, dtype=torch.int32)
        held |= dict.fromkeys(("known", "sums", "masses_of_all"), best)  # if not wide, none is read
        if has_wide_top_p:
            held["masses_of_all"] = torch.empty_like(best)
            held["known"], held["sums"] = narrow(held)
        block_b = triton.next_power_of_2(num_blocks)
        launch(_bounds_kernel, by_row, held, B=num_blocks, BLOCK_B=block_b, num_warps=4)
        for name in ("weights", "segments"):
            held[name] = logits.new_empty((num_rows, vocab), dtype=torch.int32)
        launch(_collect_kernel, by_segment, held, num_warps=4)
        launch(_threshold_kernel, by_row, held, num_warps=8)
    if draws:
        launch(_masses_kernel, by_segment, held, num_warps=4)
    launch(_draw_kernel, by_row, held, num_warps=4)
    return tokens


@triton.jit
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
    """Find the best token of a segment, as one integer: one program a segment.

    Above is its logit, in an order of integers. Below is its id, counted from the end, so that the
    first of equal ones is larger.
    """
    NUM_BLOCKS: tl.constexpr = SEGMENT // BLOCK
    row = (tl.program_id(0) // S).to(tl.int64)
    segment = tl.program_id(0) % S
    block = tl.arange(0, NUM_BLOCKS)
    token = segment * SEGMENT + block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
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


@triton.jit(do_not_specialize=["num_rows"])
def _bounds_kernel(
    settings: tl.tensor,
    best: tl.tensor,
    blocks: tl.tensor,
    known: tl.tensor,
    sums: tl.tensor,
    largest: tl.tensor,
    floor: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
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
    """Bound the weight of a row's last kept token: one program a row."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(settings + row)
    top_k = tl.load(settings + 2 * num_rows + row)
    likeliest, _ = best_of(best, row, S, BLOCK_S)
    lowest = 0x7FFFFFFF
    highest = 0x7FFFFFFF
    least = float("inf")  # nothing is collected
    if RANKS:
        has_rank = (temperature > 0) & (tl.abs(likeliest) < float("inf")) & (top_k > 0)
        if has_rank:
            lowest = least_of_ranked(blocks + row * B, top_k, likeliest, temperature, B, BLOCK_B)
    if WIDE:  # noqa: SIM102 (one is known when it is compiled)
        if wants_nucleus(settings, row, num_rows) & (tl.abs(likeliest) < float("inf")):
            lowest, highest = end_of_nucleus(known, sums, row, num_rows, S, BLOCK_S)
            # What is kept is at least as likely as min-p says: an end below it is no matter.
            barred = bits_of_min_p(settings, row, num_rows) - 1
            lowest = tl.maximum(lowest, barred)
            highest = tl.maximum(highest, barred)
    if lowest < 0x7FFFFFFF:
        least = floor_of(lowest, likeliest, temperature)
    tl.store(largest + row, likeliest)
    tl.store(floor + row, least)
    tl.store(low + row, lowest)
    tl.store(high + row, highest)
    tl.store(found + row, 0)


@triton.jit(do_not_specialize=["num_rows"])
def _collect_kernel(
    logits: tl.tensor,
    settings: tl.tensor,
    best: tl.tensor,
    largest: tl.tensor,
    floor: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    found: tl.tensor,
    weights: tl.tensor,
    segments: tl.tensor,
    masses_of_all: tl.tensor,
    masses: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    V: tl.constexpr,
    S: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Append those of a segment's weights that are within the bounds: one program a segment.

    Their order is any. For a top-p without a top-k it adds up all of them too, and those above.
    """
    row = (tl.program_id(0) // S).to(tl.int64)
    segment = tl.program_id(0) % S
    is_wide = False
    if WIDE:
        is_wide = wants_nucleus(settings, row, num_rows)
    own = logit_of(tl.load(best + row * S + segment))
    if is_wide | (own >= tl.load(floor + row)):
        likeliest = tl.load(largest + row)
        lowest = tl.load(low + row)
        highest = tl.load(high + row)
        temperature = tl.load(settings + row)
        token = segment * SEGMENT + tl.arange(0, SEGMENT)
        b_w = weights_of(logits + row * stride, token, likeliest, temperature, V)
        b_bits = b_w.to(tl.int32, bitcast=True)
        if WIDE:
            b_count = counts_of(b_w)
            b_above = tl.where(b_bits > highest, b_count, 0)
            # [2]: of all, and of those above, in one sum
            b_sum = tl.sum(tl.join(b_count, b_above), 0)
            is_all = tl.arange(0, 2) == 0
            tl.store(masses_of_all + row * S + segment, tl.sum(tl.where(is_all, b_sum, 0), 0))
            tl.store(masses + row * S + segment, tl.sum(tl.where(is_all, 0, b_sum), 0))
        keep = (b_bits >= lowest) & (b_bits <= highest) & (token < V)
        b_place = tl.cumsum(keep.to(tl.int32), 0)
        count = tl.max(b_place, 0)
        if count > 0:
            b_place += tl.atomic_add(found + row, count, sem="relaxed") - 1
            tl.store(weights + row * V + b_place, b_bits, mask=keep)
            if WIDE:
                tl.store(segments + row * V + b_place, segment, mask=keep)


@triton.jit(do_not_specialize=["num_rows"])
def _threshold_kernel(
    settings: tl.tensor,
    best: tl.tensor,
    masses_of_all: tl.tensor,
    masses: tl.tensor,
    found: tl.tensor,
    weights: tl.tensor,
    segments: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    least: tl.tensor,
    floor: tl.tensor,
    num_rows: tl.tensor,
    V: tl.constexpr,
    S: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Find the bits of a row's least weight kept, 0 for all: one program a row.

    Of a top-p without a top-k it completes the masses of the segments too, by what is collected.
    """
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(settings + 2 * num_rows + row)
    top_p = tl.load(settings + 3 * num_rows + row)
    size = tl.load(found + row)
    lowest = tl.load(low + row)
    highest = tl.load(high + row)
    own = weights + row * V
    threshold = tl.zeros((), tl.int32)
    logit = -float("inf")
    likeliest, _ = best_of(best, row, S, BLOCK_S)
    if WIDE:  # noqa: SIM102 (one is known when it is compiled)
        if wants_nucleus(settings, row, num_rows) & (size > 0):
            segment = tl.arange(0, BLOCK_S)
            place = row * S + segment
            mass = tl.sum(tl.load(masses_of_all + place, mask=segment < S, other=0), 0)
            above = tl.sum(tl.load(masses + place, mask=segment < S, other=0), 0)
            rest = nucleus_mass(mass, top_p) - above
            threshold = search_least(own, size, rest, lowest, highest, True)
            kept = tl.maximum(threshold, bits_of_min_p(settings, row, num_rows))
            add_to_segments(own, segments + row * V, size, kept, masses + row * S)
    if (size > 0) & (top_k > 0):
        highest = tl.minimum(highest, 0x3F800000)  # a weight of 1
        threshold = search_least(own, size, top_k.to(tl.int64), lowest, highest, False)
        if top_p < 1:
            mass = nucleus_mass(sum_from(own, size, threshold), top_p)
            threshold = search_least(own, size, mass, threshold, highest, True)
    if size > 0:
        logit = floor_of(threshold, likeliest, tl.load(settings + row))
    tl.store(least + row, threshold)
    tl.store(floor + row, logit)


@triton.jit(do_not_specialize=["num_rows"])
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
    WIDE: tl.constexpr,
) -> None:
    """Count a segment's kept tokens together, unless that is known: one program a segment."""
    row = (tl.program_id(0) // S).to(tl.int64)
    segment = tl.program_id(0) % S
    temperature = tl.load(settings + row)
    has_kept = temperature > 0
    is_known = False
    if FILTERS:
        own = logit_of(tl.load(best + row * S + segment))
        has_kept = has_kept & (own >= tl.load(floor + row))
    if WIDE:
        is_known = wants_nucleus(settings, row, num_rows)
        has_kept = has_kept & (is_known == 0)
    mass = tl.zeros((), tl.int64)
    if has_kept:
        likeliest, _ = best_of(best, row, S, BLOCK_S)
        threshold = kept_from(settings, least, row, num_rows, FILTERS)
        token = segment * SEGMENT + tl.arange(0, SEGMENT)
        b_w = weights_of(logits + row * stride, token, likeliest, temperature, V)
        kept = b_w.to(tl.int32, bitcast=True) >= threshold
        mass = tl.sum(tl.where(kept, counts_of(b_w), 0), 0)
    tl.store(masses + row * S + segment, mass, mask=is_known == 0)


@triton.jit(do_not_specialize=["num_rows"])
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
    """Draw a row's token: one program a row."""
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
            token = segment * SEGMENT + tl.arange(0, SEGMENT)
            b_w = weights_of(logits + row * stride, token, likeliest, temperature, V)
            kept = b_w.to(tl.int32, bitcast=True) >= threshold
            b_reached = tl.cumsum(tl.where(kept, counts_of(b_w), 0), 0)
            chosen = segment * SEGMENT + tl.sum((b_reached <= target).to(tl.int32), 0)
    tl.store(tokens + row, tl.where(is_finite, chosen, -1).to(tl.int64))
