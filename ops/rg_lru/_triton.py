# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton": a program walks the tokens of some channels, their states in registers.

Where there are many tokens, sequences are cut in segments. A launch walks the first of each, and
all others but the last from nothing, for the states that they leave; a second one walks all but the
first from where the one before it ended.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton.decays import LOG2_E, exp2_of_decay
from torch_hybrid.ops.triton.ragged import (
    fetch_rows,
    first_token_of_block,
    num_blocks,
    sequence_of_block,
)

_FETCHED = 4  # tokens of a sequence that are fetched at once
_MOST_CHANNELS = 128
_SEGMENT = 64  # tokens
_FEWEST_SEGMENTS = 4  # of as many tokens as there are; with fewer a second launch costs more


def rg_lru(
    x: Tensor,
    gates: Tensor,
    log_a: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    is_invariant: bool = False,
) -> Tensor:
    """Launcher of ``torch_hybrid::rg_lru``.

    ``is_invariant``: a token has the bits that it has in any call, by one kernel for any lengths
    that walks sequences whole.
    """
    num_tokens, num_channels = x.shape
    num_seqs = state_indices.shape[0]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block_c = min(_MOST_CHANNELS, triton.next_power_of_2(num_channels))
    is_decode = num_tokens <= num_seqs and not is_invariant
    # How many sequences there are does not count: in a captured graph most of them may be empty.
    is_whole = is_decode or is_invariant or num_tokens < _FEWEST_SEGMENTS * _SEGMENT
    segment = 0 if is_whole else _SEGMENT
    num_walks, ends, decays = num_seqs, None, None
    if segment:
        num_walks = num_blocks(num_tokens, num_seqs, segment)
        ends, decays = state.new_empty(2, num_tokens // segment, num_channels)
    for is_carried in (False, True) if segment else (False,):
        # One program more for each block of channels, for padding.
        grid = (num_walks + (not is_carried), triton.cdiv(num_channels, block_c))
        _rg_lru_kernel[grid](
            x,
            gates,
            log_a,
            state,
            cu_seqlens,
            initial_indices,
            state_indices,
            ends,
            decays,
            out,
            num_tokens,
            num_seqs,
            num_walks,
            x.stride(0),
            gates.stride(0),
            gates.stride(1),
            C=num_channels,
            D=num_channels // gates.shape[1],
            SEGMENT=segment,
            CARRIED=is_carried,
            ROWS=1 if is_decode else _FETCHED,
            BLOCK_C=block_c,
            num_warps=max(1, block_c // 32),
            enable_fp_fusion=True,
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
    """One program: a sequence, or a segment of it, and a block of channels.

    It walks the tokens, of which it fetches ROWS at once, the state in registers.
    """
    walk = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = channel < C
    if walk == num_walks:
        zeros = tl.zeros([BLOCK_C], dtype=out.dtype.element_ty)
        for token in range(tl.load(cu_seqlens + num_seqs), num_tokens):
            tl.store(out + tl.cast(token, tl.int64) * C + channel, zeros, mask=mask_c)
        return
    seq = walk
    if SEGMENT > 0:
        seq = sequence_of_block(cu_seqlens, num_seqs, walk, SEGMENT)
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    first, last = begin, end
    if SEGMENT > 0:
        first = first_token_of_block(begin, seq, walk, SEGMENT)
        last = tl.minimum(first + SEGMENT, end)
    if first >= end:
        return
    is_first = first == begin
    if CARRIED:
        if is_first:
            return
    elif (not is_first) & (last == end):
        return
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
            b_scale = tl.sqrt(_one_minus_square(b_decay, 2.0 * b_log_decay))
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
def _one_minus_square(a: tl.tensor, x: tl.tensor) -> tl.tensor:
    """1 - a^2 of a = e^(x / 2) for x <= 0. Near 0, where the difference has no digits left, by the
    series of e^x."""
    series = 1.0 + x * (1.0 / 8)
    for divisor in tl.static_range(7, 1, -1):
        series = 1.0 + x * series * (1.0 / divisor)
    return tl.where(x > -0.5, -x * series, 1.0 - a * a)
