# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton": a program walks the tokens of some channels, their states in registers.

Where channels are too few to fill a GPU, the chunk form cuts sequences in segments: a launch walks
each but the last for the states that it leaves, and then each is walked from where the one before
it ended. A state decays over a segment by its rate times the sum of its channel's steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton.decays import LOG2_E, softplus
from torch_hybrid.ops.triton.devices import PROCESSORS
from torch_hybrid.ops.triton.ragged import first_token_of_block, num_blocks, sequence_of_block
from torch_hybrid.ops.triton.state import Tile, zero_rows

_WARPS = 16 * PROCESSORS  # that segments are made for
_FEWEST_SEGMENTS = 4  # of as many tokens as there are; with fewer the first launch costs more
_SHORTEST_SEGMENT = 128  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What both launches read of the T tokens, and how the channels are dealt out to programs."""

    x: Tensor  # [T, channels]
    dt: Tensor  # [T, channels]
    B: Tensor  # [T, G, N]
    A_log: Tensor  # [channels, N]
    cu_seqlens: Tensor
    tile: Tile

    @property
    def programs(self) -> int:
        """For all channels of a sequence, or of a segment of it."""
        num_groups = self.B.shape[1]
        blocks: int = triton.cdiv(self.x.shape[1] // num_groups, self.tile.block_v)
        return num_groups * blocks

    def constants(self) -> dict[str, Any]:
        num_groups, state_dim = self.B.shape[1:]
        return {
            "G": num_groups,
            "CHANNELS": self.x.shape[1] // num_groups,
            "N": state_dim,
            "BLOCK_C": self.tile.block_v,
            "BLOCK_N": self.tile.block_k,
            "num_warps": 1,
            "enable_fp_fusion": True,
        }


def recurrent_selective_scan(*tensors: Any) -> Tensor:
    """Launcher of ``torch_hybrid::recurrent_selective_scan``."""
    return _scan(*tensors, in_segments=False)


def chunk_selective_scan(*tensors: Any, chunk_size: int) -> Tensor:
    """Launcher of ``torch_hybrid::chunk_selective_scan``; the parts are those of ``_segment``."""
    return _scan(*tensors, in_segments=True)


def _scan(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor | None,
    A_log: Tensor,
    D: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    in_segments: bool,
) -> Tensor:
    num_tokens, channels = x.shape
    num_groups, state_dim = B.shape[1:]
    num_seqs = state_indices.shape[0]
    if num_seqs == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    tile = Tile.of(channels // num_groups, state_dim)
    inputs = Inputs(x=x, dt=dt, B=B, A_log=A_log, cu_seqlens=cu_seqlens, tile=tile)
    segment = _segment(num_tokens, inputs.programs) if in_segments else 0
    starts = ends = steps = None
    num_walks = num_seqs
    if segment:
        num_walks = num_blocks(num_tokens, num_seqs, segment)
        starts, ends, steps = _walk_segments(inputs, state, initial_indices, segment)
    _scan_kernel[(inputs.programs * num_walks,)](
        x,
        dt,
        B,
        C,
        z,
        A_log,
        D,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
        starts,
        ends,
        steps,
        out,
        segment,
        num_tokens,
        num_seqs,
        x.stride(0),
        dt.stride(0),
        B.stride(0),
        C.stride(0),
        0 if z is None else z.stride(0),
        **inputs.constants(),
    )
    return out


def _segment(num_tokens: int, programs: int) -> int:
    """Tokens of a segment; 0 where sequences are walked whole.

    The number of sequences does not count: in a captured graph most of them may be empty.
    """
    wanted = min(_WARPS // programs, num_tokens // _SHORTEST_SEGMENT)
    return triton.cdiv(num_tokens, wanted) if wanted >= _FEWEST_SEGMENTS else 0


def _walk_segments(
    inputs: Inputs, state: Tensor, initial_indices: Tensor, segment: int
) -> tuple[Tensor, Tensor, Tensor]:
    """For every segment that is not the last of its sequence, by its first token: what it starts
    from where it is the first, what it leaves, and the sums of its steps."""
    num_tokens, channels = inputs.x.shape
    num_seqs = initial_indices.shape[0]
    num_kept = num_tokens // segment + 1
    starts, ends = state.new_empty(2, num_kept, *state.shape[1:])
    steps = state.new_empty(num_kept, channels)
    num_walks = num_blocks(num_tokens, num_seqs, segment)
    _segment_kernel[(inputs.programs * num_walks,)](
        inputs.x,
        inputs.dt,
        inputs.B,
        inputs.A_log,
        state,
        inputs.cu_seqlens,
        initial_indices,
        starts,
        ends,
        steps,
        segment,
        num_seqs,
        inputs.x.stride(0),
        inputs.dt.stride(0),
        inputs.B.stride(0),
        **inputs.constants(),
    )
    return starts, ends, steps


@triton.jit(do_not_specialize=["segment", "num_tokens", "num_seqs"])
def _scan_kernel(
    x: tl.tensor,
    dt: tl.tensor,
    B: tl.tensor,
    C: tl.tensor,
    z: tl.tensor | None,
    A_log: tl.tensor,
    D: tl.tensor,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    starts: tl.tensor | None,
    ends: tl.tensor | None,
    steps: tl.tensor | None,
    out: tl.tensor,
    segment: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_x: tl.tensor,
    stride_dt: tl.tensor,
    stride_b: tl.tensor,
    stride_c: tl.tensor,
    stride_z: tl.tensor,
    G: tl.constexpr,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One program: BLOCK_C channels of a group (of CHANNELS) of one sequence, or of a segment."""
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    walk = pid // (BLOCKS * G)
    seq = walk
    if ends is not None:
        seq = sequence_of_block(cu_seqlens, num_seqs, walk, segment)
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
    if ends is not None:
        first = first_token_of_block(begin, seq, walk, segment)
        last = tl.minimum(first + segment, end)
    if first < end:
        rate = tl.exp(tl.load(A_log + tile_s, mask=mask_s, other=0.0).to(tl.float32)) * -LOG2_E
        skip = tl.load(D + channel, mask=mask_c, other=0.0).to(tl.float32)
        initial = tl.load(initial_indices + seq).to(tl.int64)
        slot = tl.load(state_indices + seq).to(tl.int64)
        p_s = state + initial * (G * CHANNELS * N) + tile_s
        b_s = tl.load(p_s, mask=mask_s & (initial != 0), other=0.0)
        if ends is not None:
            if end - begin > segment:
                # A copy: the last segment may have written the slot by now.
                p_start = starts + (begin // segment).to(tl.int64) * (G * CHANNELS * N) + tile_s
                b_s = tl.load(p_start, mask=mask_s, other=0.0)
            for before in range(begin, first, segment):
                kept = (before // segment).to(tl.int64) * (G * CHANNELS)
                total = tl.load(steps + kept + channel, mask=mask_c, other=0.0)
                b_e = tl.load(ends + kept * N + tile_s, mask=mask_s, other=0.0)
                b_s = b_s * tl.exp2(rate * total[:, None]) + b_e

        # Pointers advance token by token: offsets from the base of a pool or of a long batch do
        # not fit 32 bits.
        token = first.to(tl.int64)
        p_x = x + token * stride_x + channel
        p_dt = dt + token * stride_dt + channel
        p_b = B + token * stride_b + group * N + index_n
        p_c = C + token * stride_c + group * N + index_n
        p_out = out + token * (G * CHANNELS) + channel
        if z is not None:
            p_z = z + token * stride_z + channel
        for _ in range(first, last):
            b_x = tl.load(p_x, mask=mask_c, other=0.0).to(tl.float32)
            step = softplus(tl.load(p_dt, mask=mask_c, other=0.0).to(tl.float32))
            b_b = tl.load(p_b, mask=mask_n, other=0.0).to(tl.float32)
            b_c = tl.load(p_c, mask=mask_n, other=0.0).to(tl.float32)
            b_s = b_s * tl.exp2(rate * step[:, None]) + (step * b_x)[:, None] * b_b[None, :]
            b_y = tl.sum(b_s * b_c[None, :], 1) + skip * b_x
            if z is not None:
                b_z = tl.load(p_z, mask=mask_c, other=0.0).to(tl.float32)
                b_y *= b_z / (1.0 + tl.exp(-b_z))
                p_z += stride_z
            tl.store(p_out, b_y.to(out.dtype.element_ty), mask=mask_c)
            p_x += stride_x
            p_dt += stride_dt
            p_b += stride_b
            p_c += stride_c
            p_out += G * CHANNELS
        if (slot != 0) & (last == end):
            tl.store(state + slot * (G * CHANNELS * N) + tile_s, b_s, mask=mask_s)

    if first == begin:
        # The rows past the last sequence are dealt out to the sequences in turn.
        padding = tl.load(cu_seqlens + num_seqs) + seq
        zero_rows(out, padding, num_tokens, num_seqs, group, index_c, mask_c, G, CHANNELS)


@triton.jit(do_not_specialize=["segment", "num_seqs"])
def _segment_kernel(
    x: tl.tensor,
    dt: tl.tensor,
    B: tl.tensor,
    A_log: tl.tensor,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    steps: tl.tensor,
    segment: tl.tensor,
    num_seqs: tl.tensor,
    stride_x: tl.tensor,
    stride_dt: tl.tensor,
    stride_b: tl.tensor,
    G: tl.constexpr,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One program: what one segment, which is not the last of its sequence, leaves in zero states.

    The first of a sequence copies what that starts from, for those who read it later.
    """
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    walk = pid // (BLOCKS * G)
    seq = sequence_of_block(cu_seqlens, num_seqs, walk, segment)
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    first = first_token_of_block(begin, seq, walk, segment)
    if first + segment >= end:
        return

    group = pid // BLOCKS % G
    index_c = pid % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
    index_n = tl.arange(0, BLOCK_N)
    mask_c = index_c < CHANNELS
    mask_n = index_n < N
    mask_s = mask_c[:, None] & mask_n[None, :]
    channel = group * CHANNELS + index_c
    tile_s = channel[:, None] * N + index_n[None, :]
    kept = (first // segment).to(tl.int64) * (G * CHANNELS)
    if first == begin:
        initial = tl.load(initial_indices + seq).to(tl.int64)
        p_s = state + initial * (G * CHANNELS * N) + tile_s
        b_start = tl.load(p_s, mask=mask_s & (initial != 0), other=0.0)
        tl.store(starts + kept * N + tile_s, b_start, mask=mask_s)

    rate = tl.exp(tl.load(A_log + tile_s, mask=mask_s, other=0.0).to(tl.float32)) * -LOG2_E
    b_s = tl.zeros([BLOCK_C, BLOCK_N], dtype=tl.float32)
    total = tl.zeros([BLOCK_C], dtype=tl.float32)
    token = first.to(tl.int64)
    p_x = x + token * stride_x + channel
    p_dt = dt + token * stride_dt + channel
    p_b = B + token * stride_b + group * N + index_n
    for _ in range(segment):
        b_x = tl.load(p_x, mask=mask_c, other=0.0).to(tl.float32)
        step = softplus(tl.load(p_dt, mask=mask_c, other=0.0).to(tl.float32))
        b_b = tl.load(p_b, mask=mask_n, other=0.0).to(tl.float32)
        b_s = b_s * tl.exp2(rate * step[:, None]) + (step * b_x)[:, None] * b_b[None, :]
        total += step
        p_x += stride_x
        p_dt += stride_dt
        p_b += stride_b
    tl.store(ends + kept * N + tile_s, b_s, mask=mask_s)
    tl.store(steps + kept + channel, total, mask=mask_c)
