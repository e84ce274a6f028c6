# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton" of the chunk form: one program walks the chunks of a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton_decays import (
    cumulate,
    decay_between,
    decay_of_chunk,
    decay_since_start,
    decay_until_end,
)
from torch_hybrid.ops.triton_devices import is_hopper
from torch_hybrid.ops.triton_products import dot, exact_dot, in_pieces, piece_dot, pieces_of_states
from torch_hybrid.ops.triton_state import zero_rows

_NUM_WARPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTile:
    """Tokens of a chunk, and the block ``[block_k, block_v]`` of a state that a program holds."""

    chunk: int
    block_k: int
    block_v: int

    @classmethod
    def of(cls, head_dim_k: int, head_dim_v: int, chunk_size: int, like: Tensor) -> ChunkTile:
        """As much as registers hold, for inputs of the dtype and device of ``like``."""
        block_k = max(16, triton.next_power_of_2(head_dim_k))
        hopper = is_hopper(like.device)
        if like.dtype == torch.bfloat16:
            longest, most = 64 if hopper and block_k <= 128 else 32, 8192 if hopper else 4096
        else:
            longest, most = 16, 4096 if like.dtype == torch.float16 else 2048
        return cls(
            chunk=min(chunk_size, longest),
            block_k=block_k,
            block_v=max(16, min(triton.next_power_of_2(head_dim_v), 64, most // block_k)),
        )


def chunk_ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor | None,
    D: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    *,
    scale: float,
    chunk_size: int,
) -> Tensor:
    """Launcher of ``torch_hybrid::chunk_ssd``; see ``ChunkTile`` for the longest chunk."""
    num_tokens, num_groups, head_dim_k = q.shape
    _, num_heads, head_dim_v = v.shape
    num_seqs = state_indices.shape[0]
    if num_seqs == 0:
        return torch.zeros_like(v, memory_format=torch.contiguous_format)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    tile = ChunkTile.of(head_dim_k, head_dim_v, chunk_size, q)
    q, k = in_pieces(q), in_pieces(k)
    _chunk_kernel[(triton.cdiv(head_dim_v, tile.block_v) * num_heads * num_seqs,)](
        q,
        k,
        v,
        g,
        dt,
        D,
        state,
        cu_seqlens,
        state_indices,
        has_initial_state,
        out,
        scale,
        num_tokens,
        num_seqs,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        g.stride(0),
        0 if dt is None else dt.stride(0),
        G=num_groups,
        H=num_heads,
        K=head_dim_k,
        V=head_dim_v,
        C=tile.chunk,
        P=q.shape[0],
        PS=pieces_of_states(v.dtype),
        BLOCK_K=tile.block_k,
        BLOCK_V=tile.block_v,
        num_warps=_NUM_WARPS,
        num_stages=2,
        enable_fp_fusion=True,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _chunk_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    dt: tl.tensor | None,
    D: tl.tensor | None,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    state_indices: tl.tensor,
    has_initial_state: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_q_piece: tl.tensor,
    stride_q: tl.tensor,
    stride_k_piece: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    stride_g: tl.tensor,
    stride_dt: tl.tensor,
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
    """One program: BLOCK_V rows of the state of one head of one sequence, all its chunks.

    The state is held transposed, [K, BLOCK_V].
    """
    NUM_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    seq = pid // (NUM_BLOCKS * H)
    head = pid // NUM_BLOCKS % H
    group = head // (H // G)
    index_k = tl.arange(0, BLOCK_K)
    index_v = pid % NUM_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = index_k < K
    mask_v = index_v < V
    mask_s = mask_k[:, None] & mask_v[None, :]

    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    slot = tl.load(state_indices + seq).to(tl.int64)
    if slot == 0:
        zero_rows(out, begin, end, 1, head, index_v, mask_v, H, V)
    elif begin < end:
        row = tl.arange(0, C)
        first = begin.to(tl.int64)
        p_q = q + first * stride_q + group * K + index_k[None, :] + row[:, None] * stride_q
        p_k = k + first * stride_k + group * K + index_k[None, :] + row[:, None] * stride_k
        p_v = v + first * stride_v + head * V + index_v[None, :] + row[:, None] * stride_v
        p_g = g + first * stride_g + head + row * stride_g
        p_out = out + (first * H + head) * V + index_v[None, :] + row[:, None] * (H * V)
        p_s = state + (slot * H + head) * V * K + index_v[None, :] * K + index_k[:, None]
        if dt is not None:
            p_dt = dt + first * stride_dt + head + row * stride_dt
        if D is not None:
            skip = tl.load(D + head)

        known = tl.load(has_initial_state + seq) != 0
        b_s = tl.load(p_s, mask=mask_s & known, other=0.0)
        for done in range(0, end - begin, C):
            # Rows past the end have v 0 and g 0: they change neither state nor outputs.
            mask_t = done + row < end - begin
            mask_tk = mask_t[:, None] & mask_k[None, :]
            mask_tv = mask_t[:, None] & mask_v[None, :]
            b_v = tl.load(p_v, mask=mask_tv, other=0.0).to(tl.float32)
            total = cumulate(tl.load(p_g, mask=mask_t, other=0.0))
            b_u = b_v
            if dt is not None:
                b_u *= tl.load(p_dt, mask=mask_t, other=0.0)[:, None]
                p_dt += C * stride_dt

            b_a = tl.zeros([C, C], dtype=tl.float32)
            b_o = tl.zeros([C, BLOCK_V], dtype=tl.float32)
            for piece in tl.static_range(P):
                b_q = tl.load(p_q + piece * stride_q_piece, mask=mask_tk, other=0.0)
                b_o = piece_dot(b_q, b_s, b_o, P - piece)
                for other in tl.static_range(P - piece):
                    b_k = tl.load(p_k + other * stride_k_piece, mask=mask_tk, other=0.0)
                    b_a = dot(b_q, tl.trans(b_k), b_a)
            b_o *= (decay_since_start(total) * scale)[:, None]
            b_a *= decay_between(total, C) * scale
            if P == 1:
                b_o = piece_dot(b_a.to(b_q.dtype), b_u, b_o, 1)
            else:
                b_o = exact_dot(b_a, b_u, b_o, PS)
            if D is not None:
                b_o += skip * b_v

            b_s *= decay_of_chunk(total, C)
            b_u *= decay_until_end(total, C)[:, None]
            for piece in tl.static_range(P):
                if P > 1:
                    b_k = tl.load(p_k + piece * stride_k_piece, mask=mask_tk, other=0.0)
                b_s = piece_dot(tl.trans(b_k), b_u, b_s, PS - piece)
            tl.store(p_out, b_o.to(out.dtype.element_ty), mask=mask_tv)

            p_q += C * stride_q
            p_k += C * stride_k
            p_v += C * stride_v
            p_g += C * stride_g
            p_out += C * H * V
        tl.store(p_s, b_s, mask=mask_s)

    # The rows past the last sequence are dealt out to the sequences in turn.
    padding = tl.load(cu_seqlens + num_seqs) + seq
    zero_rows(out, padding, num_tokens, num_seqs, head, index_v, mask_v, H, V)
