"""Implementation "triton": a program walks the tokens of some channels, their states in registers.

The chunk form cuts sequences in segments: one launch walks each but the last from nothing for what
it leaves; another goes from segment to segment for what each starts from; and then all are walked
from there. A state decays over a segment by its rate times the sum of its channel's steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.selective_scan.op import SelectiveScan
from torch_hybrid.ops.triton.decays import LOG2_E, exp2_of_decay, softplus
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.ragged import (
    fetch_rows,
    first_token_of_block,
    num_blocks,
    sequence_of_block,
    tokens_of_block,
)
from torch_hybrid.ops.triton.state import zero_rows

_STATES = 1024  # that one warp keeps in registers
_SEGMENT = 128  # tokens
_FEWEST_WARPS = 64  # of all channels of a sequence: with fewer, half as many states and tokens
_FETCHED = 4  # tokens of a sequence that are fetched at once
_FEWEST_SEGMENTS = 4  # of as many tokens as there are; with fewer two more launches cost more


@dataclass(frozen=True, slots=True, kw_only=True)
class Walks:
    """Programs of a call: its channels are dealt out to them, its sequences maybe cut.

    Attributes:
        given: arguments of the call.
        is_chunked: whether sequences may be cut.
        fewest_segments: of as many tokens as there are, for sequences to be cut.
    """

    given: SelectiveScan
    is_chunked: bool
    fewest_segments: int = _FEWEST_SEGMENTS

    @property
    def is_wide(self) -> bool:
        """True where channels are enough warps."""
        states = self.given.x.shape[1] * triton.next_power_of_2(self.given.B.shape[2])
        return bool(states >= _FEWEST_WARPS * _STATES)

    @property
    def segment(self) -> int:
        """Tokens of a segment; 0 where sequences are walked whole.

        The number of sequences does not count: in a captured graph most of them may be empty.
        """
        segment = _SEGMENT if self.is_wide else _SEGMENT // 2
        is_cut = self.is_chunked and len(self.given.x) >= self.fewest_segments * segment
        return segment if is_cut else 0

    @property
    def programs(self) -> int:
        """Number for all channels of a sequence, or of a segment of it."""
        sizes = self.sizes()
        blocks: int = triton.cdiv(sizes["CHANNELS"], sizes["BLOCK_C"])
        return sizes["G"] * blocks

    @property
    def segments(self) -> int:
        """Number that any sequences of as many tokens may be cut in."""
        return num_blocks(len(self.given.x), len(self.given.initial_indices), self.segment)

    def sizes(self) -> dict[str, int]:
        num_groups, state_dim = self.given.B.shape[1:]
        channels = self.given.x.shape[1] // num_groups
        block_n = triton.next_power_of_2(state_dim)
        states = _STATES if self.is_wide else _STATES // 2
        return {
            "G": num_groups,
            "CHANNELS": channels,
            "N": state_dim,
            "BLOCK_C": min(triton.next_power_of_2(channels), max(1, states // block_n)),
            "BLOCK_N": block_n,
        }

    def constants(self) -> dict[str, Any]:
        launched = {"SEGMENT": self.segment, "num_warps": 1, "enable_fp_fusion": True}
        return {**self.sizes(), **launched}


def selective_scan(
    given: SelectiveScan, *, is_chunked: bool = False, fewest_segments: int = _FEWEST_SEGMENTS
) -> Tensor:
    """Launch either form; the parts of the chunk form are segments."""
    x = given.x
    num_seqs = given.state_indices.shape[0]
    if num_seqs == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    walks = Walks(given=given, is_chunked=is_chunked, fewest_segments=fewest_segments)
    starts, ends = walk_segments(walks) if walks.segment else (None, None)
    num_walks = walks.segments if walks.segment else num_seqs
    bind(_scan_kernel, given)[(walks.programs * num_walks,)](
        starts=starts,
        ends=ends,
        out=out,
        ROWS=_FETCHED if is_chunked else 1,
        **walks.constants(),
    )
    return out


def walk_segments(walks: Walks) -> tuple[Tensor, Tensor]:
    """Find what a sequence of several segments starts from, by the first token of its first one.

    And the states after each segment that is not its last, by that segment's first token.
    """
    given = walks.given
    num_tokens, channels = given.x.shape
    num_seqs = len(given.initial_indices)
    num_kept = num_tokens // walks.segment
    starts, ends = given.state.new_empty(2, num_kept, *given.state.shape[1:])
    steps = given.state.new_empty(num_kept, channels)
    bind(_segment_kernel, given)[(walks.programs * walks.segments,)](
        ends=ends, steps=steps, ROWS=_FETCHED, **walks.constants()
    )
    bind(_carry_kernel, given)[(walks.programs * num_seqs,)](
        starts=starts, ends=ends, steps=steps, ROWS=_FETCHED, **walks.constants()
    )
    return starts, ends


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _scan_kernel(
    x: tl.tensor,
    dt: tl.tensor,
    B: tl.tensor,
    C: tl.tensor,
    z: tl.tensor | None,
    A_log: tl.tensor,
    D: tl.tensor,
    dt_bias: tl.tensor | None,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    starts: tl.tensor | None,
    ends: tl.tensor | None,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_x: tl.tensor,
    stride_dt: tl.tensor,
    stride_B: tl.tensor,
    stride_C: tl.tensor,
    stride_z: tl.tensor,
    G: tl.constexpr,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Walk BLOCK_C channels of a group (of CHANNELS) of one sequence, or of a segment: one program.

    It walks the tokens, of which it fetches ROWS at once.
    """
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    walk = pid // (BLOCKS * G)
    seq = walk
    if SEGMENT > 0:
        seq = sequence_of_block(cu_seqlens, num_seqs, walk, SEGMENT)
    group = pid // BLOCKS % G
    index_c = pid % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
    index_n = tl.arange(0, BLOCK_N)
    mask_c = index_c < CHANNELS
    mask_n = index_n < N
    mask_s = mask_c[:, None] & mask_n[None, :]
    channel = group * CHANNELS + index_c
    tile_s = channel[:, None] * N + index_n[None, :]

    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    first, last = begin, end
    if SEGMENT > 0:
        first = first_token_of_block(begin, seq, walk, SEGMENT)
        last = tl.minimum(first + SEGMENT, end)
    if first < end:
        rate = tl.exp(tl.load(A_log + tile_s, mask=mask_s, other=0.0).to(tl.float32)) * -LOG2_E
        if dt_bias is not None:
            bias = tl.load(dt_bias + channel, mask=mask_c, other=0.0).to(tl.float32)
        initial = tl.load(initial_indices + seq).to(tl.int64)
        slot = tl.load(state_indices + seq).to(tl.int64)
        p_start = state + initial * (G * CHANNELS * N)
        is_known = initial != 0
        if SEGMENT > 0:
            # Copies, also of what the first starts from: the last may have written the slot by now.
            is_cut = end - begin > SEGMENT
            p_kept = tl.where(first == begin, starts, ends - G * CHANNELS * N)
            p_kept += (first // SEGMENT).to(tl.int64) * (G * CHANNELS * N)
            p_start = tl.where(is_cut, p_kept, p_start)
            is_known |= is_cut
        b_s = tl.load(p_start + tile_s, mask=mask_s & is_known, other=0.0)

        p_b = B + group * N + index_n
        p_c = C + group * N + index_n
        for start in range(first, last, ROWS):
            rows_x = fetch_rows(x + channel, start, last, stride_x, mask_c, ROWS)
            rows_dt = fetch_rows(dt + channel, start, last, stride_dt, mask_c, ROWS)
            rows_b = fetch_rows(p_b, start, last, stride_B, mask_n, ROWS)
            rows_c = fetch_rows(p_c, start, last, stride_C, mask_n, ROWS)
            if z is not None:
                rows_z = fetch_rows(z + channel, start, last, stride_z, mask_c, ROWS)
            # Read again, since one that is kept all the way takes registers that are spilled then.
            skip = tl.load(D + channel, mask=mask_c, other=0.0).to(tl.float32)
            for place in tl.static_range(ROWS):
                is_there = start + place < last
                b_x = rows_x[place].to(tl.float32)
                before = rows_dt[place].to(tl.float32)
                if dt_bias is not None:
                    before += bias
                step = tl.where(is_there, softplus(before), 0.0)
                b_s = after(b_s, rate, step, b_x, rows_b[place].to(tl.float32))
                b_y = tl.sum(b_s * rows_c[place].to(tl.float32)[None, :], 1) + skip * b_x
                if z is not None:
                    b_z = rows_z[place].to(tl.float32)
                    b_y *= b_z / (1.0 + tl.exp(-b_z))
                p_out = out + tl.cast(start + place, tl.int64) * (G * CHANNELS) + channel
                tl.store(p_out, b_y.to(out.dtype.element_ty), mask=mask_c & is_there)
        if (slot != 0) & (last == end):
            tl.store(state + slot * (G * CHANNELS * N) + tile_s, b_s, mask=mask_s)

    if first == begin:
        # The rows past the last sequence are dealt out to the sequences in turn.
        padding = tl.load(cu_seqlens + num_seqs) + seq
        zero_rows(out, padding, num_tokens, num_seqs, group, index_c, mask_c, G, CHANNELS)


@triton.jit(do_not_specialize=["num_seqs"])
def _segment_kernel(
    x: tl.tensor,
    dt: tl.tensor,
    B: tl.tensor,
    A_log: tl.tensor,
    dt_bias: tl.tensor | None,
    cu_seqlens: tl.tensor,
    ends: tl.tensor,
    steps: tl.tensor,
    num_seqs: tl.tensor,
    stride_x: tl.tensor,
    stride_dt: tl.tensor,
    stride_B: tl.tensor,
    G: tl.constexpr,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Find what one segment, which is not the last of its sequence, leaves in zero states, and the
    sums of its steps: one program."""
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    walk = pid // (BLOCKS * G)
    _seq, _begin, end, first = tokens_of_block(cu_seqlens, num_seqs, walk, SEGMENT)
    last = first + SEGMENT
    if last >= end:
        return

    group = pid // BLOCKS % G
    index_c = pid % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
    index_n = tl.arange(0, BLOCK_N)
    mask_c = index_c < CHANNELS
    mask_n = index_n < N
    mask_s = mask_c[:, None] & mask_n[None, :]
    channel = group * CHANNELS + index_c
    tile_s = channel[:, None] * N + index_n[None, :]
    rate = tl.exp(tl.load(A_log + tile_s, mask=mask_s, other=0.0).to(tl.float32)) * -LOG2_E
    if dt_bias is not None:
        bias = tl.load(dt_bias + channel, mask=mask_c, other=0.0).to(tl.float32)
    b_s = tl.zeros([BLOCK_C, BLOCK_N], dtype=tl.float32)
    total = tl.zeros([BLOCK_C], dtype=tl.float32)
    for start in range(first, last, ROWS):
        rows_x = fetch_rows(x + channel, start, last, stride_x, mask_c, ROWS)
        rows_dt = fetch_rows(dt + channel, start, last, stride_dt, mask_c, ROWS)
        rows_b = fetch_rows(B + group * N + index_n, start, last, stride_B, mask_n, ROWS)
        for place in tl.static_range(ROWS):
            before = rows_dt[place].to(tl.float32)
            if dt_bias is not None:
                before += bias
            step = softplus(before)
            b_x = rows_x[place].to(tl.float32)
            b_s = after(b_s, rate, step, b_x, rows_b[place].to(tl.float32))
            total += step
    kept = (first // SEGMENT).to(tl.int64) * (G * CHANNELS)
    tl.store(ends + kept * N + tile_s, b_s, mask=mask_s)
    tl.store(steps + kept + channel, total, mask=mask_c)


@triton.jit
def _carry_kernel(
    A_log: tl.tensor,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    steps: tl.tensor,
    G: tl.constexpr,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Carry BLOCK_C channels of one sequence through its several segments: one program.

    It copies what the sequence starts from, and puts what a segment leaves in the place of what it
    leaves in zero states.
    """
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    seq = pid // (BLOCKS * G)
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    if begin + SEGMENT >= end:
        return

    index_c = pid % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
    index_n = tl.arange(0, BLOCK_N)
    mask_c = index_c < CHANNELS
    mask_s = mask_c[:, None] & (index_n < N)[None, :]
    channel = pid // BLOCKS % G * CHANNELS + index_c
    tile_s = channel[:, None] * N + index_n[None, :]
    rate = tl.exp(tl.load(A_log + tile_s, mask=mask_s, other=0.0).to(tl.float32)) * -LOG2_E
    initial = tl.load(initial_indices + seq).to(tl.int64)
    p_s = state + initial * (G * CHANNELS * N) + tile_s
    b_s = tl.load(p_s, mask=mask_s & (initial != 0), other=0.0)
    first = begin // SEGMENT
    last = first + (end - begin - 1) // SEGMENT
    tl.store(starts + first.to(tl.int64) * (G * CHANNELS * N) + tile_s, b_s, mask=mask_s)
    for start in range(first, last, ROWS):
        rows_step = fetch_rows(steps + channel, start, last, G * CHANNELS, mask_c, ROWS)
        rows_end = fetch_rows(ends + tile_s, start, last, G * CHANNELS * N, mask_s, ROWS)
        for place in tl.static_range(ROWS):
            b_s = b_s * exp2_of_decay(rate * rows_step[place][:, None]) + rows_end[place]
            p_end = ends + tl.cast(start + place, tl.int64) * (G * CHANNELS * N) + tile_s
            tl.store(p_end, b_s, mask=mask_s & (start + place < last))


@triton.jit
def after(
    b_s: tl.tensor, rate: tl.tensor, step: tl.tensor, b_x: tl.tensor, b_b: tl.tensor
) -> tl.tensor:
    """Advance states by a token, of which the steps are 0 where there is none."""
    return b_s * exp2_of_decay(rate * step[:, None]) + (step * b_x)[:, None] * b_b[None, :]
