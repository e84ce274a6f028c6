"""Implementation "triton" of the backward: segments of 64 tokens are walked at once.

1. ``_ends_kernel``, segments by blocks of channels: the state that each segment leaves, as in the
   forward, and the gradient of the state before it, both as if it were alone.
2. ``_segment_kernel``: walks all segments both ways, from what the ones before and after it left.

A sequence has the same bits whatever lies beside it, and no sum is atomic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.core.packed import empty_gradients
from torch_hybrid.ops.rg_lru._triton import one_minus_square
from torch_hybrid.ops.rg_lru.training.op import MAX_SQRT_GRADIENT, TrainedRgLru
from torch_hybrid.ops.triton.channel_programs import ChannelPrograms, walk_of, zero_padding
from torch_hybrid.ops.triton.decays import LOG2_E, exp2_of_decay
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.ragged import fetch_rows

_LEAST_ROOT: tl.constexpr = tl.constexpr(0.5 / MAX_SQRT_GRADIENT)


@without_autocast
def rg_lru_backward(x: TrainedRgLru) -> tuple[Tensor, ...]:
    """Compute the gradients of x, the gates, log_a and the initial state."""
    num_tokens, num_channels = x.x.shape
    dx, dgates, _, dinitial = empty_gradients(x)
    if x.initial_state is not None:  # of empty sequences, which nobody walks
        dinitial.zero_() if x.dfinal_state is None else dinitial.copy_(x.dfinal_state)
    walks = ChannelPrograms.of(num_tokens, x.num_seqs, num_channels, is_cut=True)
    [grid, constants], _ = walks.launches()
    shared = {
        "ends": x.states(triton.cdiv(num_tokens, walks.segment)),
        "decays": x.states(triton.cdiv(num_tokens, walks.segment)),
        "leads": x.states(triton.cdiv(num_tokens, walks.segment)),
        "D": num_channels // x.gates.shape[1],
        **constants,
    }
    del shared["CARRIED"]
    sums = x.states(walks.num_walks).zero_()
    bind(_ends_kernel, x)[grid](**shared)
    bind(_segment_kernel, x, walks)[grid](
        states=x.states(num_tokens),
        dx=dx,
        dgates=dgates,
        sums=sums,
        dinitial=dinitial,
        **shared,
    )
    return dx, dgates, sums.sum(0), dinitial


@triton.jit(do_not_specialize=["num_seqs"])
def _ends_kernel(
    x: tl.tensor,
    gates: tl.tensor,
    log_a: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_state: tl.tensor | None,
    dout: tl.tensor,
    dfinal_state: tl.tensor | None,
    ends: tl.tensor,  # states that segments leave, by their first tokens
    decays: tl.tensor,  # logarithms of theirs, likewise
    leads: tl.tensor,  # gradients of the states before them, likewise
    num_seqs: tl.tensor,
    stride_x: tl.tensor,
    stride_gates: tl.tensor,
    stride_gates_head: tl.tensor,
    stride_dout: tl.tensor,
    C: tl.constexpr,
    D: tl.constexpr,
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Walk a segment in a block of channels: one program. ROWS tokens are fetched at once.

    Sums over later tokens take each one's gradient by the decay since the segment's start.
    """
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = channel < C
    if tl.program_id(0) == tl.num_programs(0) - 1:  # padding
        return
    walk = tl.program_id(0)
    seq, begin, end, first, last, _is_walked = walk_of(cu_seqlens, num_seqs, walk, SEGMENT, False)
    if (first >= end) | (end - begin <= SEGMENT):
        return
    is_first = first == begin
    b_log_a = tl.load(log_a + channel, mask=mask_c, other=0.0)
    row = tl.cast(seq, tl.int64) * C + channel
    b_h = tl.zeros([BLOCK_C], dtype=tl.float32)
    if initial_state is not None:
        b_h = tl.load(initial_state + row, mask=mask_c & is_first, other=0.0)
    b_lead = tl.zeros([BLOCK_C], dtype=tl.float32)
    b_log_decays = tl.zeros([BLOCK_C], dtype=tl.float32)
    p_gate = gates + (channel // D).to(tl.int64) * stride_gates_head + channel % D
    for start in range(first, last, ROWS):
        rows_x = fetch_rows(x + channel, start, last, stride_x, mask_c, ROWS)
        rows_input = fetch_rows(p_gate, start, last, stride_gates, mask_c, ROWS)
        rows_recurrent = fetch_rows(p_gate + D, start, last, stride_gates, mask_c, ROWS)
        rows_dout = fetch_rows(dout + channel, start, last, stride_dout, mask_c, ROWS)
        for place in tl.static_range(ROWS):
            is_there = start + place < last
            b_recurrent = _sigmoid(rows_recurrent[place])
            b_log_decay = b_log_a * b_recurrent
            b_decay, b_scale = _decay(b_log_decay)
            if initial_state is None:
                b_scale = tl.where(start + place == begin, 1.0, b_scale)
            b_added = b_scale * rows_x[place].to(tl.float32) * _sigmoid(rows_input[place])
            b_h = tl.where(is_there, b_decay * b_h + b_added, b_h)
            b_log_decays += tl.where(is_there, b_log_decay, 0.0)
            b_lead += exp2_of_decay(b_log_decays * LOG2_E) * rows_dout[place].to(tl.float32)
    if dfinal_state is not None:
        b_dfinal = tl.load(dfinal_state + row, mask=mask_c & (last == end), other=0.0)
        b_lead += exp2_of_decay(b_log_decays * LOG2_E) * b_dfinal
    place = (first // SEGMENT).to(tl.int64) * C + channel
    tl.store(ends + place, b_h, mask=mask_c & (last < end))
    tl.store(decays + place, b_log_decays, mask=mask_c & (last < end))
    tl.store(leads + place, b_lead, mask=mask_c & (not is_first))


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "num_walks"])
def _segment_kernel(
    x: tl.tensor,
    gates: tl.tensor,
    log_a: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_state: tl.tensor | None,
    dout: tl.tensor,
    dfinal_state: tl.tensor | None,
    ends: tl.tensor,
    decays: tl.tensor,
    leads: tl.tensor,
    states: tl.tensor,  # before each token
    dx: tl.tensor,
    dgates: tl.tensor,
    sums: tl.tensor,  # gradients of log_a by each segment
    dinitial: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    num_walks: tl.tensor,
    stride_x: tl.tensor,
    stride_gates: tl.tensor,
    stride_gates_head: tl.tensor,
    stride_dout: tl.tensor,
    C: tl.constexpr,
    D: tl.constexpr,
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Walk a segment in a block of channels, forwards and then back: one program.

    The state and its gradient are in registers; states before tokens go to memory and come back.
    """
    walk = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = channel < C
    if walk == num_walks:
        zero_padding(dx, cu_seqlens, num_seqs, num_tokens, channel, mask_c, C)
        zero_padding(dgates, cu_seqlens, num_seqs, num_tokens, channel, mask_c, 2 * C)
        zero_padding(dgates, cu_seqlens, num_seqs, num_tokens, C + channel, mask_c, 2 * C)
        return
    seq, begin, end, first, last, _is_walked = walk_of(cu_seqlens, num_seqs, walk, SEGMENT, False)
    if first >= end:
        return
    b_log_a = tl.load(log_a + channel, mask=mask_c, other=0.0)
    row = tl.cast(seq, tl.int64) * C + channel
    place_of = first // SEGMENT
    b_h = tl.zeros([BLOCK_C], dtype=tl.float32)
    if initial_state is not None:
        b_h = tl.load(initial_state + row, mask=mask_c & (first == begin), other=0.0)
    for start in range(place_of - (first - begin) // SEGMENT, place_of, ROWS):
        rows_decay = fetch_rows(decays + channel, start, place_of, C, mask_c, ROWS)
        rows_end = fetch_rows(ends + channel, start, place_of, C, mask_c, ROWS)
        for place in tl.static_range(ROWS):
            b_h = exp2_of_decay(rows_decay[place] * LOG2_E) * b_h + rows_end[place]
    num_later = (end - last + SEGMENT - 1) // SEGMENT
    b_dh = tl.zeros([BLOCK_C], dtype=tl.float32)
    if num_later > 0:
        p_last = leads + (place_of + num_later).to(tl.int64) * C + channel
        b_dh = tl.load(p_last, mask=mask_c, other=0.0)
    elif dfinal_state is not None:
        b_dh = tl.load(dfinal_state + row, mask=mask_c, other=0.0)
    for back in range(1, num_later):
        later = (place_of + num_later - back).to(tl.int64) * C + channel
        b_log_decays = tl.load(decays + later, mask=mask_c, other=0.0)
        b_lead = tl.load(leads + later, mask=mask_c, other=0.0)
        b_dh = exp2_of_decay(b_log_decays * LOG2_E) * b_dh + b_lead

    p_gate = gates + (channel // D).to(tl.int64) * stride_gates_head + channel % D
    for start in range(first, last, ROWS):
        rows_x = fetch_rows(x + channel, start, last, stride_x, mask_c, ROWS)
        rows_input = fetch_rows(p_gate, start, last, stride_gates, mask_c, ROWS)
        rows_recurrent = fetch_rows(p_gate + D, start, last, stride_gates, mask_c, ROWS)
        for place in tl.static_range(ROWS):
            is_there = start + place < last
            p_state = states + tl.cast(start + place, tl.int64) * C + channel
            tl.store(p_state, b_h, mask=mask_c & is_there)
            b_recurrent = _sigmoid(rows_recurrent[place])
            b_log_decay = b_log_a * b_recurrent
            b_decay, b_scale = _decay(b_log_decay)
            if initial_state is None:
                b_scale = tl.where(start + place == begin, 1.0, b_scale)
            b_added = b_scale * rows_x[place].to(tl.float32) * _sigmoid(rows_input[place])
            b_h = tl.where(is_there, b_decay * b_h + b_added, b_h)
    tl.debug_barrier()  # states are read by who wrote them, or by another thread

    b_sum = tl.zeros([BLOCK_C], dtype=tl.float32)
    last_start = first + (last - first - 1) // ROWS * ROWS
    p_dgate = dgates + (channel // D) * 2 * D + channel % D
    for back in range(0, last - first, ROWS):
        start = last_start - back
        rows_x = fetch_rows(x + channel, start, last, stride_x, mask_c, ROWS)
        rows_input = fetch_rows(p_gate, start, last, stride_gates, mask_c, ROWS)
        rows_recurrent = fetch_rows(p_gate + D, start, last, stride_gates, mask_c, ROWS)
        rows_dout = fetch_rows(dout + channel, start, last, stride_dout, mask_c, ROWS)
        rows_state = fetch_rows(states + channel, start, last, C, mask_c, ROWS)
        for place in tl.static_range(ROWS - 1, -1, -1):
            is_there = start + place < last
            b_recurrent = _sigmoid(rows_recurrent[place])
            b_log_decay = b_log_a * b_recurrent
            b_decay, b_scale = _decay(b_log_decay)
            b_input = _sigmoid(rows_input[place])
            b_x = rows_x[place].to(tl.float32)
            b_dscale = -b_decay * b_decay / tl.maximum(b_scale, _LEAST_ROOT)
            if initial_state is None:
                is_new = start + place == begin
                b_scale = tl.where(is_new, 1.0, b_scale)
                b_dscale = tl.where(is_new, 0.0, b_dscale)
            b_dh += rows_dout[place].to(tl.float32)
            b_dgated = b_scale * b_dh
            b_dlog_decay = b_dh * (b_decay * rows_state[place] + b_dscale * b_input * b_x)
            b_sum += tl.where(is_there, b_dlog_decay * b_recurrent, 0.0)
            b_dinput = b_dgated * b_x * b_input * (1.0 - b_input)
            b_drecurrent = b_dlog_decay * b_log_a * b_recurrent * (1.0 - b_recurrent)
            token = tl.cast(start + place, tl.int64) * C
            mask = mask_c & is_there
            tl.store(dx + token + channel, (b_dgated * b_input).to(dx.dtype.element_ty), mask=mask)
            tl.store(p_dgate + 2 * token, b_dinput.to(dgates.dtype.element_ty), mask=mask)
            tl.store(p_dgate + 2 * token + D, b_drecurrent.to(dgates.dtype.element_ty), mask=mask)
            b_dh = tl.where(is_there, b_decay * b_dh, b_dh)
    tl.store(sums + tl.cast(walk, tl.int64) * C + channel, b_sum, mask=mask_c)
    if initial_state is not None:
        tl.store(dinitial + row, b_dh, mask=mask_c & (first == begin))


@triton.jit
def _sigmoid(gate: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))


@triton.jit
def _decay(b_log_decay: tl.tensor) -> tl.tuple:
    """Compute a decay and the scale of inputs beside it."""
    b_decay = exp2_of_decay(b_log_decay * LOG2_E)
    return b_decay, tl.sqrt(one_minus_square(b_decay, 2.0 * b_log_decay))
