"""Implementation "triton" of the backward: segments of 64 tokens are walked at once.

1. ``_ends_kernel``, segments by blocks of channels: the sums that each segment leaves, as in the
   forward.
2. ``_leads_kernel``: walks all segments from what the ones before them left. It keeps the sums
   before each token, and finds the gradient of those before the segment as if it were the last.
3. ``_segment_kernel``: walks all segments back, from what the ones after them left.

A sequence has the same bits whatever lies beside it, and no sum is atomic. Gradients of sums are
sums as well, divided by the exponential of the largest exponent in them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.core.packed import empty_gradients
from torch_hybrid.ops.triton.channel_programs import ChannelPrograms, walk_of, zero_padding
from torch_hybrid.ops.triton.decays import LOG2_E, exp2_of_decay
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.ragged import fetch_rows
from torch_hybrid.ops.wkv._triton import joined_weights, store_sums
from torch_hybrid.ops.wkv.op import NOTHING
from torch_hybrid.ops.wkv.training.op import TrainedWkv

_NOTHING: tl.constexpr = tl.constexpr(NOTHING)


@without_autocast
def wkv_backward(x: TrainedWkv) -> tuple[Tensor, ...]:
    """Compute the gradients of k, v, log_decay, bonus and the initial state."""
    num_tokens, num_channels = x.k.shape
    dk, dv, _, _, dinitial = empty_gradients(x)
    if x.initial_state is not None:  # of empty sequences, which nobody walks
        dinitial.zero_() if x.dfinal_state is None else dinitial.copy_(x.dfinal_state)
    walks = ChannelPrograms.of(num_tokens, x.num_seqs, num_channels, is_cut=True)
    [grid, constants], _ = walks.launches()
    del constants["CARRIED"]
    num_segments = triton.cdiv(num_tokens, walks.segment)
    held = {
        "ends": x.states(num_segments),
        "leads": x.states(num_segments),
        "kept": x.log_decay.new_empty(num_segments, num_channels),
        "exponents": x.log_decay.new_zeros(x.num_seqs, num_channels),
        "states": x.states(num_tokens),
    }
    sums = x.log_decay.new_zeros(2, walks.num_walks, num_channels)
    bind(_ends_kernel, x)[grid](ends=held["ends"], **constants)
    bind(_leads_kernel, x)[grid](**held, **constants)
    del held["ends"]
    bind(_segment_kernel, x, walks)[grid](
        dk=dk, dv=dv, sums=sums, dinitial=dinitial, **held, **constants
    )
    dlog_decay, dbonus = sums.sum(1)
    return dk, dv, dlog_decay, dbonus, dinitial


@triton.jit(do_not_specialize=["num_seqs"])
def _ends_kernel(
    k: tl.tensor,
    v: tl.tensor,
    log_decay: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_state: tl.tensor | None,
    ends: tl.tensor,  # sums that segments leave, by their first tokens
    num_seqs: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    C: tl.constexpr,
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Walk a segment that is not its sequence's last in a block of channels: one program.

    ROWS tokens are fetched at once. Segments but the first are walked from nothing.
    """
    walk = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = channel < C
    if walk == tl.num_programs(0) - 1:  # padding
        return
    seq, begin, end, first, last, _is_walked = walk_of(cu_seqlens, num_seqs, walk, SEGMENT, False)
    if (first >= end) | (last == end):
        return
    b_log_decay = tl.load(log_decay + channel, mask=mask_c, other=0.0)
    b_num, b_den, b_exponent = _initial(initial_state, seq, channel, mask_c, first == begin, C)
    for start in range(first, last, ROWS):
        rows_k = fetch_rows(k + channel, start, last, stride_k, mask_c, ROWS)
        rows_v = fetch_rows(v + channel, start, last, stride_v, mask_c, ROWS)
        for place in tl.static_range(ROWS):
            b_k, b_v = rows_k[place].to(tl.float32), rows_v[place].to(tl.float32)
            b_before, b_own, b_largest = joined_weights(b_exponent + b_log_decay, b_k)
            b_num = b_before * b_num + b_own * b_v
            b_den = b_before * b_den + b_own
            b_exponent = b_largest
    left = (first // SEGMENT).to(tl.int64) * 3 * C + channel
    store_sums(ends + left, b_num, b_den, b_exponent, mask_c, C)


@triton.jit(do_not_specialize=["num_seqs"])
def _leads_kernel(
    k: tl.tensor,
    v: tl.tensor,
    log_decay: tl.tensor,
    bonus: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_state: tl.tensor | None,
    dout: tl.tensor,
    dfinal_state: tl.tensor | None,
    ends: tl.tensor,
    leads: tl.tensor,  # gradients of the sums before segments, by their first tokens
    kept: tl.tensor,  # 1 where no key of a segment was larger than what was before, likewise
    exponents: tl.tensor,  # gradients of the final states' exponents
    states: tl.tensor,  # sums before each token
    num_seqs: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    stride_dout: tl.tensor,
    C: tl.constexpr,
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Walk a segment in a block of channels: one program; sums are in registers."""
    walk = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = channel < C
    if walk == tl.num_programs(0) - 1:  # padding
        return
    seq, begin, end, first, last, _is_walked = walk_of(cu_seqlens, num_seqs, walk, SEGMENT, False)
    if first >= end:
        return
    b_log_decay = tl.load(log_decay + channel, mask=mask_c, other=0.0)
    b_bonus = tl.load(bonus + channel, mask=mask_c, other=0.0)
    b_num, b_den, b_exponent = _initial(initial_state, seq, channel, mask_c, first == begin, C)
    stop = first // SEGMENT
    for segment in range(stop - (first - begin) // SEGMENT, stop):
        p_end = ends + tl.cast(segment, tl.int64) * 3 * C + channel
        b_end = tl.load(p_end + 2 * C, mask=mask_c, other=0.0)
        b_before, b_after, b_largest = joined_weights(b_exponent + SEGMENT * b_log_decay, b_end)
        b_num = b_before * b_num + b_after * tl.load(p_end, mask=mask_c, other=0.0)
        b_den = b_before * b_den + b_after * tl.load(p_end + C, mask=mask_c, other=0.0)
        b_exponent = b_largest
    b_above = tl.zeros([BLOCK_C], dtype=tl.float32)
    b_below = tl.zeros([BLOCK_C], dtype=tl.float32)
    b_lead = tl.full([BLOCK_C], _NOTHING, dtype=tl.float32)
    b_kept = tl.full([BLOCK_C], 1.0, dtype=tl.float32)
    b_since = tl.zeros([BLOCK_C], dtype=tl.float32)  # logarithm of the decay since the first token
    for start in range(first, last, ROWS):
        rows_k = fetch_rows(k + channel, start, last, stride_k, mask_c, ROWS)
        rows_v = fetch_rows(v + channel, start, last, stride_v, mask_c, ROWS)
        rows_dout = fetch_rows(dout + channel, start, last, stride_dout, mask_c, ROWS)
        for place in tl.static_range(ROWS):
            is_there = start + place < last
            p_state = states + tl.cast(start + place, tl.int64) * 3 * C + channel
            store_sums(p_state, b_num, b_den, b_exponent, mask_c & is_there, C)
            b_k, b_v = rows_k[place].to(tl.float32), rows_v[place].to(tl.float32)
            b_before, b_own, b_all = joined_weights(b_exponent, b_k + b_bonus)
            b_total = b_before * b_den + b_own
            b_out = (b_before * b_num + b_own * b_v) / b_total
            b_dall = tl.where(is_there, rows_dout[place].to(tl.float32) / b_total, 0.0)
            b_past, b_new, b_largest = joined_weights(b_lead, b_since - b_all)
            b_above = tl.where(is_there, b_past * b_above + b_new * b_dall, b_above)
            b_below = tl.where(is_there, b_past * b_below - b_new * b_dall * b_out, b_below)
            b_lead = tl.where(is_there, b_largest, b_lead)
            b_since += tl.where(is_there, b_log_decay, 0.0)
            b_kept = tl.where(is_there & (b_exponent + b_log_decay <= b_k), 0.0, b_kept)
            b_before, b_own, b_largest = joined_weights(b_exponent + b_log_decay, b_k)
            b_num = tl.where(is_there, b_before * b_num + b_own * b_v, b_num)
            b_den = tl.where(is_there, b_before * b_den + b_own, b_den)
            b_exponent = tl.where(is_there, b_largest, b_exponent)
    if dfinal_state is not None:
        row = tl.cast(seq, tl.int64) * 3 * C + channel
        is_last = mask_c & (last == end)
        b_dnum = tl.load(dfinal_state + row, mask=is_last, other=0.0)
        b_dden = tl.load(dfinal_state + row + C, mask=is_last, other=0.0)
        b_own = tl.load(dfinal_state + row + 2 * C, mask=is_last, other=0.0)
        p_exponent = exponents + tl.cast(seq, tl.int64) * C + channel
        tl.store(p_exponent, b_own - b_dnum * b_num - b_dden * b_den, mask=is_last)
        b_after = tl.where(last == end, b_since - b_exponent, _NOTHING)
        b_past, b_new, b_largest = joined_weights(b_lead, b_after)
        b_above = b_past * b_above + b_new * b_dnum
        b_below = b_past * b_below + b_new * b_dden
        b_lead = b_largest
    is_carried = mask_c & (first > begin)
    store_sums(leads + stop.to(tl.int64) * 3 * C + channel, b_above, b_below, b_lead, is_carried, C)
    tl.store(kept + stop.to(tl.int64) * C + channel, b_kept, mask=is_carried)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "num_walks"])
def _segment_kernel(
    k: tl.tensor,
    v: tl.tensor,
    log_decay: tl.tensor,
    bonus: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_state: tl.tensor | None,
    dout: tl.tensor,
    dfinal_state: tl.tensor | None,
    leads: tl.tensor,
    kept: tl.tensor,
    exponents: tl.tensor,
    states: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    sums: tl.tensor,  # gradients of log_decay and bonus by each segment
    dinitial: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    num_walks: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    stride_dout: tl.tensor,
    C: tl.constexpr,
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Walk a segment back in a block of channels: one program; gradients are in registers."""
    walk = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = channel < C
    if walk == num_walks:
        zero_padding(dk, cu_seqlens, num_seqs, num_tokens, channel, mask_c, C)
        zero_padding(dv, cu_seqlens, num_seqs, num_tokens, channel, mask_c, C)
        return
    seq, begin, end, first, last, _is_walked = walk_of(cu_seqlens, num_seqs, walk, SEGMENT, False)
    if first >= end:
        return
    b_log_decay = tl.load(log_decay + channel, mask=mask_c, other=0.0)
    b_bonus = tl.load(bonus + channel, mask=mask_c, other=0.0)
    row = tl.cast(seq, tl.int64) * 3 * C + channel
    b_above = tl.zeros([BLOCK_C], dtype=tl.float32)
    b_below = tl.zeros([BLOCK_C], dtype=tl.float32)
    b_lead = tl.full([BLOCK_C], _NOTHING, dtype=tl.float32)
    b_dexponent = tl.zeros([BLOCK_C], dtype=tl.float32)
    if dfinal_state is not None:
        b_dexponent = tl.load(
            exponents + tl.cast(seq, tl.int64) * C + channel, mask=mask_c, other=0.0
        )
        if last == end:
            p_last = states + tl.cast(last - 1, tl.int64) * 3 * C + channel
            p_key = k + tl.cast(last - 1, tl.int64) * stride_k + channel
            b_key = tl.load(p_key, mask=mask_c, other=0.0).to(tl.float32)
            b_exponent = tl.load(p_last + 2 * C, mask=mask_c, other=0.0) + b_log_decay
            b_above = tl.load(dfinal_state + row, mask=mask_c, other=0.0)
            b_below = tl.load(dfinal_state + row + C, mask=mask_c, other=0.0)
            b_lead = -tl.maximum(b_exponent, b_key)
    stop = first // SEGMENT
    num_later = (end - last + SEGMENT - 1) // SEGMENT
    for back in range(num_later):
        segment = tl.cast(stop + num_later - back, tl.int64)
        p_lead = leads + segment * 3 * C + channel
        b_own = tl.load(p_lead + 2 * C, mask=mask_c, other=0.0)
        b_past, b_new, b_largest = joined_weights(b_lead + SEGMENT * b_log_decay, b_own)
        b_above = b_past * b_above + b_new * tl.load(p_lead, mask=mask_c, other=0.0)
        b_below = b_past * b_below + b_new * tl.load(p_lead + C, mask=mask_c, other=0.0)
        b_lead = b_largest
        b_dexponent *= tl.load(kept + segment * C + channel, mask=mask_c, other=0.0)

    b_dlog_decay = tl.zeros([BLOCK_C], dtype=tl.float32)
    b_dbonus = tl.zeros([BLOCK_C], dtype=tl.float32)
    last_start = first + (last - first - 1) // ROWS * ROWS
    for back in range(0, last - first, ROWS):
        start = last_start - back
        rows_k = fetch_rows(k + channel, start, last, stride_k, mask_c, ROWS)
        rows_v = fetch_rows(v + channel, start, last, stride_v, mask_c, ROWS)
        rows_dout = fetch_rows(dout + channel, start, last, stride_dout, mask_c, ROWS)
        rows_num = fetch_rows(states + channel, start, last, 3 * C, mask_c, ROWS)
        rows_den = fetch_rows(states + C + channel, start, last, 3 * C, mask_c, ROWS)
        rows_exponent = fetch_rows(states + 2 * C + channel, start, last, 3 * C, mask_c, ROWS)
        for place in tl.static_range(ROWS - 1, -1, -1):
            is_there = start + place < last
            b_num, b_den, b_exponent = rows_num[place], rows_den[place], rows_exponent[place]
            b_k, b_v = rows_k[place].to(tl.float32), rows_v[place].to(tl.float32)
            # What the token is to all later ones.
            b_seen = exp2_of_decay((b_k + b_lead) * LOG2_E)
            b_dv = b_seen * b_above
            b_dk = b_dv * b_v + b_seen * b_below
            b_decayed = exp2_of_decay((b_log_decay + b_exponent + b_lead) * LOG2_E)
            b_passed = b_decayed * (b_above * b_num + b_below * b_den)
            # The exponent of the state after the token is that before it or the token's own.
            is_kept = b_exponent + b_log_decay > b_k
            b_dk += tl.where(is_kept, 0.0, b_dexponent)
            b_dexponent = tl.where(is_kept | (not is_there), b_dexponent, 0.0)
            b_dlog_decay += tl.where(is_there, b_passed + b_dexponent, 0.0)
            b_before, b_own, b_all = joined_weights(b_exponent, b_k + b_bonus)
            b_total = b_before * b_den + b_own
            b_out = (b_before * b_num + b_own * b_v) / b_total
            b_dall = rows_dout[place].to(tl.float32) / b_total
            b_down = b_own * b_dall * (b_v - b_out)
            b_dbonus += tl.where(is_there, b_down, 0.0)
            token = tl.cast(start + place, tl.int64) * C + channel
            mask = mask_c & is_there
            tl.store(dk + token, (b_dk + b_down).to(dk.dtype.element_ty), mask=mask)
            tl.store(dv + token, (b_dv + b_own * b_dall).to(dv.dtype.element_ty), mask=mask)
            b_past, b_new, b_largest = joined_weights(b_lead + b_log_decay, -b_all)
            b_above = tl.where(is_there, b_past * b_above + b_new * b_dall, b_above)
            b_below = tl.where(is_there, b_past * b_below - b_new * b_dall * b_out, b_below)
            b_lead = tl.where(is_there, b_largest, b_lead)
    p_sums = sums + tl.cast(walk, tl.int64) * C + channel
    tl.store(p_sums, b_dlog_decay, mask=mask_c)
    tl.store(p_sums + tl.cast(num_walks, tl.int64) * C, b_dbonus, mask=mask_c)
    if initial_state is not None:
        is_first = mask_c & (first == begin)
        b_num, b_den, b_exponent = _initial(initial_state, seq, channel, mask_c, True, C)
        b_weight = exp2_of_decay((b_exponent + b_lead) * LOG2_E)
        b_above, b_below = b_weight * b_above, b_weight * b_below
        b_dexponent += b_above * b_num + b_below * b_den
        store_sums(dinitial + row, b_above, b_below, b_dexponent, is_first, C)


@triton.jit
def _initial(
    initial_state: tl.tensor | None,
    seq: tl.tensor,
    channel: tl.tensor,
    mask: tl.tensor,
    is_first: tl.tensor,
    C: tl.constexpr,
) -> tl.tuple:
    """Load the sums that a segment starts from if it is its sequence's first, else of nothing."""
    b_num = tl.zeros_like(channel).to(tl.float32)
    b_den = tl.zeros_like(channel).to(tl.float32)
    b_exponent = tl.full(channel.shape, _NOTHING, dtype=tl.float32)
    if initial_state is not None:
        p_initial = initial_state + tl.cast(seq, tl.int64) * 3 * C + channel
        b_num = tl.load(p_initial, mask=mask & is_first, other=0.0)
        b_den = tl.load(p_initial + C, mask=mask & is_first, other=0.0)
        b_exponent = tl.load(p_initial + 2 * C, mask=mask & is_first, other=_NOTHING)
    return b_num, b_den, b_exponent
