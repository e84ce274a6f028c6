"""Implementation "triton": a program walks the tokens of some channels, their states in registers
(``ops.triton.channel_programs``)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.rg_lru.op import RgLru
from torch_hybrid.ops.triton.channel_programs import ChannelPrograms, walk_of, zero_padding
from torch_hybrid.ops.triton.decays import LOG2_E, exp2_of_decay
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.ragged import fetch_rows


def rg_lru(given: RgLru, *, is_invariant: bool = False, is_cut: bool = False) -> Tensor:
    """Launch ``torch_hybrid::rg_lru``.

    ``is_invariant``: a token has the bits that it has in any call, by one kernel for any lengths
    that walks sequences whole. ``is_cut``: it has the bits that it has in its sequence alone.
    """
    x, gates = given.x, given.gates
    num_tokens, num_channels = x.shape
    num_seqs = given.state_indices.shape[0]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    walks = ChannelPrograms.of(
        num_tokens, num_seqs, num_channels, is_invariant=is_invariant, is_cut=is_cut
    )
    ends = decays = None
    if walks.segment:
        ends, decays = given.state.new_empty(2, walks.num_segments, num_channels)
    for grid, constants in walks.launches():
        bind(_rg_lru_kernel, given, walks)[grid](
            ends=ends, decays=decays, out=out, D=num_channels // gates.shape[1], **constants
        )
    return out


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "num_walks"])
def _rg_lru_kernel(
    x: tl.tensor,
    gates: tl.tensor,
    log_a: tl.tensor,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    ends: tl.tensor | None,  # states that segments leave, by their first tokens
    decays: tl.tensor | None,  # logarithms of theirs, likewise
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    num_walks: tl.tensor,
    stride_x: tl.tensor,
    stride_gates: tl.tensor,
    stride_gates_head: tl.tensor,
    C: tl.constexpr,
    D: tl.constexpr,
    SEGMENT: tl.constexpr,  # tokens; 0 where sequences are walked whole
    CARRIED: tl.constexpr,  # whether segments are walked that begin where another ended
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Walk a sequence, or a segment of it, in a block of channels: one program.

    It walks the tokens, of which it fetches ROWS at once, the state in registers.
    """
    walk = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = channel < C
    if walk == num_walks:
        zero_padding(out, cu_seqlens, num_seqs, num_tokens, channel, mask_c, C)
        return
    seq, begin, end, first, last, is_walked = walk_of(cu_seqlens, num_seqs, walk, SEGMENT, CARRIED)
    if not is_walked:
        return
    is_first = first == begin
    slot = tl.load(state_indices + seq).to(tl.int64)
    b_log_a = tl.load(log_a + channel, mask=mask_c, other=0.0)
    if CARRIED:
        is_new = False
        b_h = tl.zeros([BLOCK_C], dtype=tl.float32)
        stop = first // SEGMENT
        for start in range(stop - (first - begin) // SEGMENT, stop, ROWS):
            rows_decay = fetch_rows(decays + channel, start, stop, C, mask_c, ROWS)
            rows_end = fetch_rows(ends + channel, start, stop, C, mask_c, ROWS)
            for place in tl.static_range(ROWS):
                b_h = exp2_of_decay(rows_decay[place] * LOG2_E) * b_h + rows_end[place]
    else:
        initial = tl.load(initial_indices + seq).to(tl.int64)
        is_known = (initial != 0) & is_first
        is_new = is_first & (initial == 0)
        b_h = tl.load(state + initial * C + channel, mask=mask_c & is_known, other=0.0)
    b_log_decays = tl.zeros([BLOCK_C], dtype=tl.float32)
    p_gate = gates + (channel // D).to(tl.int64) * stride_gates_head + channel % D
    for start in range(first, last, ROWS):
        rows_x = fetch_rows(x + channel, start, last, stride_x, mask_c, ROWS)
        rows_input = fetch_rows(p_gate, start, last, stride_gates, mask_c, ROWS)
        rows_recurrent = fetch_rows(p_gate + D, start, last, stride_gates, mask_c, ROWS)
        for place in tl.static_range(ROWS):
            is_there = start + place < last
            b_log_decay = b_log_a / (1.0 + tl.exp(-rows_recurrent[place].to(tl.float32)))
            b_decay = exp2_of_decay(b_log_decay * LOG2_E)
            b_scale = tl.sqrt(one_minus_square(b_decay, 2.0 * b_log_decay))
            b_scale = tl.where((start + place == begin) & is_new, 1.0, b_scale)
            b_added = b_scale * rows_x[place].to(tl.float32)
            b_added /= 1.0 + tl.exp(-rows_input[place].to(tl.float32))
            b_h = tl.where(is_there, b_decay * b_h + b_added, b_h)
            b_log_decays += b_log_decay
            p_out = out + tl.cast(start + place, tl.int64) * C + channel
            if not CARRIED:
                is_there &= is_first
            tl.store(p_out, b_h.to(out.dtype.element_ty), mask=mask_c & is_there)
    if last == end:
        tl.store(state + slot * C + channel, b_h, mask=mask_c & (slot != 0))
    if SEGMENT > 0 and not CARRIED:
        left = (first // SEGMENT).to(tl.int64) * C + channel
        tl.store(ends + left, b_h, mask=mask_c & (last < end))
        tl.store(decays + left, b_log_decays, mask=mask_c & (last < end))


@triton.jit
def one_minus_square(a: tl.tensor, x: tl.tensor) -> tl.tensor:
    """Compute 1 - a^2 of a = e^(x / 2) for x <= 0; near 0 by the series of e^x.

    There the difference has no digits left.
    """
    series = 1.0 + x * (1.0 / 8)
    for divisor in tl.static_range(7, 1, -1):
        series = 1.0 + x * series * (1.0 / divisor)
    return tl.where(x > -0.5, -x * series, 1.0 - a * a)
