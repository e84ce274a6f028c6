"""Implementation "triton" of the chunk form: one program walks the chunks of a head.

Where heads are too few to fill a GPU, sequences are cut in segments: a launch walks each but the
last for the state that it leaves, and then each is walked from where the one before it ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.ssd.op import Ssd
from torch_hybrid.ops.triton.decays import LOG2_E, cumulate
from torch_hybrid.ops.triton.devices import PROCESSORS, is_hopper
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.products import (
    dot,
    exact_dot,
    in_pieces,
    piece_dot,
    pieces_of_states,
    transpose_dot,
)
from torch_hybrid.ops.triton.ragged import (
    first_token_of_block,
    num_blocks,
    sequence_of_block,
    tokens_of_block,
)
from torch_hybrid.ops.triton.state import zero_rows

_HEADS = 16  # of a program that cumulates decays
_FEWEST_SEGMENTS = 4  # of as many tokens as there are; with fewer the first launch costs more
_SHORTEST_SEGMENT = 512  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTile:
    """Tokens of a chunk, and the block ``[block_v, block_k]`` of a state that a program holds."""

    chunk: int
    block_k: int
    block_v: int
    num_warps: int

    @classmethod
    def of(cls, head_dim_k: int, head_dim_v: int, like: Tensor) -> ChunkTile:
        """Choose as much as registers hold, for inputs of the dtype and device of ``like``."""
        block_k = max(16, triton.next_power_of_2(head_dim_k))
        if like.dtype == torch.bfloat16:
            # A warp's products have 16 rows.
            on_hopper = is_hopper(like.device)
            chunk = 64 if on_hopper and block_k <= 128 else 32
            most, num_warps = (64, 4) if block_k <= 128 else (32, 4 if on_hopper else 8)
        else:
            chunk, most, num_warps = 16, 4096 if like.dtype == torch.float16 else 2048, 8
            most //= block_k
        block_v = max(16, min(triton.next_power_of_2(head_dim_v), most))
        return cls(chunk=chunk, block_k=block_k, block_v=block_v, num_warps=num_warps)


def chunk_ssd(x: Ssd) -> Tensor:
    """Launch a walk of each sequence, or of its segments; chunks are those of ``ChunkTile``."""
    v, state = x.v, x.state
    num_tokens, _, head_dim_k = x.q.shape
    _, num_heads, head_dim_v = v.shape
    num_seqs = x.state_indices.shape[0]
    if num_seqs == 0:
        return torch.zeros_like(v, memory_format=torch.contiguous_format)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    tile = ChunkTile.of(head_dim_k, head_dim_v, x.q)
    factors = _decays(x, tile.chunk)
    q, k = in_pieces(x.q), in_pieces(x.k)
    programs = triton.cdiv(head_dim_v, tile.block_v) * num_heads  # of a sequence or a segment
    segment = _segment(num_tokens, programs, tile.chunk)
    starts = ends = decays = None
    num_walks = num_seqs
    constants = {
        "C": tile.chunk,
        "P": q.shape[1],
        "PS": pieces_of_states(v.dtype),
        "BLOCK_K": tile.block_k,
        "BLOCK_V": tile.block_v,
        "num_warps": tile.num_warps,
        "enable_fp_fusion": True,
    }
    if segment:
        num_walks = num_blocks(num_tokens, num_seqs, segment)
        num_kept = num_tokens // segment + 1
        starts, ends = state.new_empty(2, num_kept, *state.shape[1:])
        decays = state.new_empty(num_kept, num_heads)
        bind(_segment_kernel, x)[(programs * num_walks,)](
            k=k,
            factors=factors,
            starts=starts,
            ends=ends,
            decays=decays,
            segment=segment,
            num_stages=3,
            **constants,
        )
    bind(_chunk_kernel, x)[(programs * num_walks,)](
        q=q,
        k=k,
        factors=factors,
        starts=starts,
        ends=ends,
        decays=decays,
        out=out,
        segment=segment,
        # Two programs share a multiprocessor, or each fetches further ahead.
        num_stages=2 if segment or programs * num_seqs > PROCESSORS else 3,
        **constants,
    )
    return out


def _segment(num_tokens: int, programs: int, chunk: int) -> int:
    """Choose the tokens of a segment, a multiple of ``chunk``; 0 where sequences are walked whole.

    The number of sequences does not count: in a captured graph most of them may be empty.
    """
    wanted = min(2 * PROCESSORS // programs, num_tokens // _SHORTEST_SEGMENT)
    return triton.cdiv(num_tokens, wanted * chunk) * chunk if wanted >= _FEWEST_SEGMENTS else 0


def _decays(x: Ssd, chunk: int) -> Tensor:
    """Compute what the decays of X chunks of C tokens make of rows, ``[X, H, 6, C]`` float32.

    By what a row of q reads the state before the chunk; by what a row of v goes into the outputs
    of the chunk, and into the state after it; the sum of g from the chunk's first token on, to
    base 2, in two numbers whose sum it is; and by what the whole chunk decays the state.
    """
    g = x.g
    num_tokens, num_heads = g.shape
    num_seqs = x.cu_seqlens.shape[0] - 1
    num_chunks = num_blocks(num_tokens, num_seqs, chunk)
    factors = g.new_empty(num_chunks, num_heads, 6, chunk, dtype=torch.float32)
    bind(_decay_kernel, x)[(num_chunks, triton.cdiv(num_heads, _HEADS))](
        factors=factors, C=chunk, BLOCK_H=_HEADS, num_warps=4
    )
    return factors


@triton.jit(do_not_specialize=["num_seqs"])
def _decay_kernel(
    g: tl.tensor,
    dt: tl.tensor | None,
    cu_seqlens: tl.tensor,
    factors: tl.tensor,
    scale: tl.tensor,
    num_seqs: tl.tensor,
    stride_g: tl.tensor,
    stride_dt: tl.tensor,
    H: tl.constexpr,
    C: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """Make the factors of one chunk of BLOCK_H heads."""
    chunk = tl.program_id(0)
    _seq, _begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, chunk, C)
    if first_token >= end:
        return

    # Rows past the end have g 0 and dt 0: they change neither state nor outputs.
    row = tl.arange(0, C)[None, :]
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    token = (first_token + row).to(tl.int64)
    mask_h = head < H
    mask = mask_h & (first_token + row < end)
    total = cumulate(tl.load(g + token * stride_g + head, mask=mask, other=0.0), 1)
    step = mask.to(tl.float32)
    if dt is not None:
        step = tl.load(dt + token * stride_dt + head, mask=mask, other=0.0)
    whole = tl.sum(tl.where(row == C - 1, total, 0.0), 1)[:, None]
    total_log2 = total * LOG2_E
    high = total_log2.to(tl.float32)
    p_f = factors + (chunk.to(tl.int64) * H + head) * 6 * C + row
    tl.store(p_f, tl.exp(total).to(tl.float32) * scale, mask=mask_h)
    tl.store(p_f + C, step * scale, mask=mask_h)
    tl.store(p_f + 2 * C, step * tl.exp(whole - total).to(tl.float32), mask=mask_h)
    tl.store(p_f + 3 * C, high, mask=mask_h)
    tl.store(p_f + 4 * C, (total_log2 - high.to(tl.float64)).to(tl.float32), mask=mask_h)
    tl.store(p_f + 5 * C, tl.exp(whole + 0.0 * total).to(tl.float32), mask=mask_h)


@triton.jit(do_not_specialize=["segment", "num_tokens", "num_seqs"])
def _chunk_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    factors: tl.tensor,
    D: tl.tensor | None,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    starts: tl.tensor | None,
    ends: tl.tensor | None,
    decays: tl.tensor | None,
    out: tl.tensor,
    segment: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    # Constants, so that a tile's rows lie at constant distances: fewer registers.
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    PS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Walk the chunks of one sequence, or of a segment of it, with BLOCK_V rows of a head's state.

    Tokens and channels are columns of all that it computes. So the state and the values are left
    sides of products, which stay in registers.
    """
    NUM_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    walk = pid // (NUM_BLOCKS * H)
    seq = walk
    if ends is not None:
        seq = sequence_of_block(cu_seqlens, num_seqs, walk, segment)
    head = pid // NUM_BLOCKS % H
    group = head // (H // G)
    index_k = tl.arange(0, BLOCK_K)[None, :]
    first_v = pid % NUM_BLOCKS * BLOCK_V
    index_v = tl.arange(0, BLOCK_V)
    mask_k = (index_k < K) | (K == BLOCK_K)
    mask_v = (first_v + index_v < V) | (V % BLOCK_V == 0)
    mask_s = mask_v[:, None] & mask_k

    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    first, last = begin, end
    if ends is not None:
        first = first_token_of_block(begin, seq, walk, segment)
        last = tl.minimum(first + segment, end)
    if first == begin:
        # The rows past the last sequence are dealt out to the sequences in turn.
        padding = tl.load(cu_seqlens + num_seqs) + seq
        zero_rows(out, padding, num_tokens, num_seqs, head, first_v + index_v, mask_v, H, V)

    if first < last:
        row = tl.arange(0, C)
        tile_q = row[:, None] * STRIDE_Q + index_k
        tile_k = row[:, None] * STRIDE_K + index_k
        tile_v = row[:, None] * STRIDE_V + index_v[None, :]
        tile_out = row[None, :] * (H * V) + index_v[:, None]
        if D is not None:
            skip = tl.load(D + head)

        initial = tl.load(initial_indices + seq).to(tl.int64)
        tile_s = (head * V + first_v) * K + index_v[:, None] * K + index_k
        p_s = state + initial * (H * V * K)
        has_state = initial != 0
        if ends is not None:
            kept = begin // segment  # of the sequence's first segment
            if end - begin > segment:
                # The pool's may have been written, by who walks the last segment.
                p_s = (starts if first == begin else ends) + kept.to(tl.int64) * (H * V * K)
                has_state = True
        b_s = tl.load(p_s + tile_s, mask=mask_s & has_state, other=0.0)
        if ends is not None:
            for before in range(kept + 1, kept + (first - begin) // segment):
                p_s = ends + tl.cast(before, tl.int64) * (H * V * K)
                b_end = tl.load(p_s + tile_s, mask=mask_s, other=0.0)
                b_s = b_s * tl.load(decays + before * H + head) + b_end
        for done in range(first - begin, last - begin, C):
            # From the token each time: one number to keep instead of four places.
            token = (begin + done).to(tl.int64)
            p_q = q + token * STRIDE_Q + group * K
            p_k = k + token * STRIDE_K + group * K
            p_v = v + token * STRIDE_V + head * V + first_v
            p_out = out + (token * H + head) * V + first_v
            p_f = factors + (((begin // C + seq) + done // C).to(tl.int64) * H + head) * 6 * C
            mask_t = done + row < end - begin
            mask_tk = mask_t[:, None] & mask_k

            # What tokens j, the rows, add to tokens i, the columns.
            b_a = tl.zeros([C, C], dtype=tl.float32)
            for piece in tl.static_range(P - 1, -1, -1):
                b_q = tl.load(p_q + piece * G * K + tile_q, mask=mask_tk, other=0.0)
                for other in tl.static_range(P - 1 - piece, -1, -1):
                    b_k = tl.load(p_k + other * G * K + tile_k, mask=mask_tk, other=0.0)
                    b_a = dot(b_k, tl.trans(b_q), b_a)
            index = done + row
            is_past = index[:, None] <= index[None, :]
            between = tl.load(p_f + 3 * C + row)[None, :] - tl.load(p_f + 3 * C + row)[:, None]
            if P > 1 or v.dtype.element_ty == tl.float32:
                p_rest = p_f + 4 * C + row
                between += tl.load(p_rest)[None, :] - tl.load(p_rest)[:, None]
            b_a *= tl.exp2(tl.where(is_past, between, -float("inf")))
            b_a *= tl.load(p_f + C + row)[:, None]
            if P == 1:
                b_a = b_a.to(b_q.dtype)  # now: it takes half the registers from here on

            b_o = tl.zeros([BLOCK_V, C], dtype=tl.float32)
            for piece in tl.static_range(P - 1, -1, -1):
                b_q = tl.load(p_q + piece * G * K + tile_q, mask=mask_tk, other=0.0)
                b_o = piece_dot(b_s, tl.trans(b_q), b_o, P - piece)
            b_o *= tl.load(p_f + row)[None, :]
            b_v = tl.load(p_v + tile_v, mask=mask_t[:, None] & mask_v[None, :], other=0.0)
            # Long before it is needed, since it is not fetched ahead.
            decay = tl.load(p_f + 5 * C)
            b_v = transpose_dot(b_v, tl.zeros([BLOCK_V, C], dtype=tl.float32))
            if P == 1:  # noqa: SIM108  (one branch is compiled)
                b_o = piece_dot(b_v, b_a, b_o, 1)
            else:
                b_o = exact_dot(b_v, b_a, b_o, PS)
            if D is not None:
                b_o += skip * b_v
            mask_out = mask_v[:, None] & mask_t[None, :]
            tl.store(p_out + tile_out, b_o.to(out.dtype.element_ty), mask=mask_out)

            b_u = b_v * tl.load(p_f + 2 * C + row)[None, :]
            update = tl.zeros([BLOCK_V, BLOCK_K], dtype=tl.float32)
            for piece in tl.static_range(P - 1, -1, -1):
                if P > 1:
                    b_k = tl.load(p_k + piece * G * K + tile_k, mask=mask_tk, other=0.0)
                update = piece_dot(b_u, b_k, update, PS - piece)
            b_s = b_s * decay + update

        # Read here, so that no register holds the place of the state through the loop.
        slot = tl.load(state_indices + seq).to(tl.int64)
        if (slot != 0) & (last == end):
            tl.store(state + slot * (H * V * K) + tile_s, b_s, mask=mask_s)


@triton.jit(do_not_specialize=["segment", "num_seqs"])
def _segment_kernel(
    k: tl.tensor,
    v: tl.tensor,
    factors: tl.tensor,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    decays: tl.tensor,
    segment: tl.tensor,
    num_seqs: tl.tensor,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    PS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Compute what one segment, which is not the last of its sequence, leaves in a state.

    The first segment starts from the sequence's own state, which is copied for those who read it
    later; the others from zero.
    """
    NUM_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    walk = pid // (NUM_BLOCKS * H)
    head = pid // NUM_BLOCKS % H
    group = head // (H // G)
    seq, begin, end, first = tokens_of_block(cu_seqlens, num_seqs, walk, segment)
    if first + segment >= end:
        return

    row = tl.arange(0, C)
    index_k = tl.arange(0, BLOCK_K)[None, :]
    first_v = pid % NUM_BLOCKS * BLOCK_V
    index_v = tl.arange(0, BLOCK_V)
    mask_k = (index_k < K) | (K == BLOCK_K)
    mask_v = (first_v + index_v < V) | (V % BLOCK_V == 0)
    mask_s = mask_v[:, None] & mask_k
    tile_k = row[:, None] * STRIDE_K + index_k
    tile_v = row[:, None] * STRIDE_V + index_v[None, :]
    tile_s = (head * V + first_v) * K + index_v[:, None] * K + index_k

    b_s = tl.zeros([BLOCK_V, BLOCK_K], dtype=tl.float32)
    if first == begin:
        initial = tl.load(initial_indices + seq).to(tl.int64)
        p_s = state + initial * (H * V * K) + tile_s
        b_s = tl.load(p_s, mask=mask_s & (initial != 0), other=0.0)
        p_start = starts + (begin // segment).to(tl.int64) * (H * V * K)
        tl.store(p_start + tile_s, b_s, mask=mask_s)
    whole = 1.0
    for done in range(first - begin, first - begin + segment, C):
        token = (begin + done).to(tl.int64)
        p_k = k + token * STRIDE_K + group * K
        p_v = v + token * STRIDE_V + head * V + first_v
        p_f = factors + (((begin // C + seq) + done // C).to(tl.int64) * H + head) * 6 * C
        b_v = tl.load(p_v + tile_v, mask=mask_v[None, :], other=0.0)
        b_v = transpose_dot(b_v, tl.zeros([BLOCK_V, C], dtype=tl.float32))
        b_u = b_v * tl.load(p_f + 2 * C + row)[None, :]
        decay = tl.load(p_f + 5 * C)
        update = tl.zeros([BLOCK_V, BLOCK_K], dtype=tl.float32)
        for piece in tl.static_range(P - 1, -1, -1):
            b_k = tl.load(p_k + piece * G * K + tile_k, mask=mask_k, other=0.0)
            update = piece_dot(b_u, b_k, update, PS - piece)
        b_s = b_s * decay + update
        whole *= decay

    kept = (first // segment).to(tl.int64)
    tl.store(ends + kept * (H * V * K) + tile_s, b_s, mask=mask_s)
    if first_v == 0:
        tl.store(decays + kept * H + head, whole)
