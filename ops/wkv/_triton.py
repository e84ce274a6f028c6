"""Implementation "triton": a program walks the tokens of some channels, their states in registers
(``ops.triton.channel_programs``)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton.channel_programs import ChannelPrograms, walk_of, zero_padding
from torch_hybrid.ops.triton.decays import LOG2_E, exp2_of_decay
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.ragged import fetch_rows
from torch_hybrid.ops.wkv.op import NOTHING, Wkv

_NOTHING: tl.constexpr = tl.constexpr(NOTHING)


def wkv(x: Wkv, *, is_invariant: bool = False, is_cut: bool = False) -> Tensor:
    """Launch ``torch_hybrid::wkv``.

    ``is_invariant``: a token has the bits that it has in any call, by one kernel for any lengths
    that walks sequences whole. ``is_cut``: it has the bits that it has in its sequence alone.
    """
    num_tokens, num_channels = x.k.shape
    num_seqs = x.state_indices.shape[0]
    out = torch.empty_like(x.k, memory_format=torch.contiguous_format)
    walks = ChannelPrograms.of(
        num_tokens, num_seqs, num_channels, is_invariant=is_invariant, is_cut=is_cut
    )
    ends = x.state.new_empty(walks.num_segments, 3, num_channels) if walks.segment else None
    for grid, constants in walks.launches():
        bind(_wkv_kernel, x, walks)[grid](ends=ends, out=out, **constants)
    return out


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "num_walks"])
def _wkv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    log_decay: tl.tensor,
    bonus: tl.tensor,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    ends: tl.tensor | None,  # states that segments leave, by their first tokens
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    num_walks: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    C: tl.constexpr,
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
    b_log_decay = tl.load(log_decay + channel, mask=mask_c, other=0.0)
    b_bonus = tl.load(bonus + channel, mask=mask_c, other=0.0)
    b_num = tl.zeros([BLOCK_C], dtype=tl.float32)
    b_den = tl.zeros([BLOCK_C], dtype=tl.float32)
    b_exponent = tl.full([BLOCK_C], _NOTHING, dtype=tl.float32)
    if CARRIED:
        stop = first // SEGMENT
        for start in range(stop - (first - begin) // SEGMENT, stop, ROWS):
            rows_num = fetch_rows(ends + channel, start, stop, 3 * C, mask_c, ROWS)
            rows_den = fetch_rows(ends + C + channel, start, stop, 3 * C, mask_c, ROWS)
            rows_exponent = fetch_rows(ends + 2 * C + channel, start, stop, 3 * C, mask_c, ROWS)
            for place in tl.static_range(ROWS):
                b_decayed = b_exponent + SEGMENT * b_log_decay
                b_before, b_after, b_largest = joined_weights(b_decayed, rows_exponent[place])
                is_there = start + place < stop
                sum_num = b_before * b_num + b_after * rows_num[place]
                sum_den = b_before * b_den + b_after * rows_den[place]
                b_num = tl.where(is_there, sum_num, b_num)
                b_den = tl.where(is_there, sum_den, b_den)
                b_exponent = tl.where(is_there, b_largest, b_exponent)
    else:
        initial = tl.load(initial_indices + seq).to(tl.int64)
        is_known = (initial != 0) & is_first
        p_initial = state + initial * 3 * C + channel
        b_num = tl.load(p_initial, mask=mask_c & is_known, other=0.0)
        b_den = tl.load(p_initial + C, mask=mask_c & is_known, other=0.0)
        b_exponent = tl.load(p_initial + 2 * C, mask=mask_c & is_known, other=_NOTHING)
    for start in range(first, last, ROWS):
        rows_k = fetch_rows(k + channel, start, last, stride_k, mask_c, ROWS)
        rows_v = fetch_rows(v + channel, start, last, stride_v, mask_c, ROWS)
        for place in tl.static_range(ROWS):
            is_there = start + place < last
            b_k = rows_k[place].to(tl.float32)
            b_v = rows_v[place].to(tl.float32)
            b_before, b_own, _ = joined_weights(b_exponent, b_k + b_bonus)
            b_out = (b_before * b_num + b_own * b_v) / (b_before * b_den + b_own)
            b_before, b_own, b_largest = joined_weights(b_exponent + b_log_decay, b_k)
            b_num = tl.where(is_there, b_before * b_num + b_own * b_v, b_num)
            b_den = tl.where(is_there, b_before * b_den + b_own, b_den)
            b_exponent = tl.where(is_there, b_largest, b_exponent)
            p_out = out + tl.cast(start + place, tl.int64) * C + channel
            if not CARRIED:
                is_there &= is_first
            tl.store(p_out, b_out.to(out.dtype.element_ty), mask=mask_c & is_there)
    if last == end:
        store_sums(
            state + slot * 3 * C + channel, b_num, b_den, b_exponent, mask_c & (slot != 0), C
        )
    if SEGMENT > 0 and not CARRIED:
        left = (first // SEGMENT).to(tl.int64) * 3 * C + channel
        store_sums(ends + left, b_num, b_den, b_exponent, mask_c & (last < end), C)


@triton.jit
def joined_weights(a: tl.tensor, b: tl.tensor) -> tl.tuple:
    """Compute e^a and e^b, both divided by the larger of them, and its exponent."""
    lead = a - b
    factor = exp2_of_decay(-tl.abs(lead) * LOG2_E)
    return tl.where(lead > 0, 1.0, factor), tl.where(lead > 0, factor, 1.0), tl.maximum(a, b)


@triton.jit
def store_sums(
    pointer: tl.tensor,
    num: tl.tensor,
    den: tl.tensor,
    exponent: tl.tensor,
    mask: tl.tensor,
    C: tl.constexpr,
) -> None:
    tl.store(pointer, num, mask=mask)
    tl.store(pointer + C, den, mask=mask)
    tl.store(pointer + 2 * C, exponent, mask=mask)
