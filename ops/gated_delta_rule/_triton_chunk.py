# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton" of the chunk form: systems of all chunks in parallel, then the scan."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton.decays import (
    cumulate,
    decay_between,
    decay_of_chunk,
    decay_since_start,
    decay_until_end,
)
from torch_hybrid.ops.triton.delta_rule import Prepared, Rows, chunk_length, inverse, scan
from torch_hybrid.ops.triton.products import dot, in_pieces, inverse_root, store_pieces
from torch_hybrid.ops.triton.ragged import first_token_of_block, sequence_of_block


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    scale: float,
    qk_l2norm: bool,
    chunk_size: int,
) -> Tensor:
    """Launcher of ``torch_hybrid::chunk_gated_delta_rule``; its chunks are its own."""
    num_seqs = state_indices.shape[0]
    if num_seqs == 0:
        return torch.zeros_like(v, memory_format=torch.contiguous_format)
    chunk = chunk_length(q)
    prepared = Prepared.empty(q, num_seqs, v.shape[1], chunk, factors=(4, chunk))
    q, k = in_pieces(q), in_pieces(k)
    _prepare(prepared, q, k, g, beta, cu_seqlens, scale=scale, qk_l2norm=qk_l2norm)
    rows = Rows(queries=q, reads=k, writes=k)
    return scan(prepared, rows, v, state, cu_seqlens, initial_indices, state_indices)


def _prepare(
    prepared: Prepared,
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    qk_l2norm: bool,
) -> None:
    num_chunks, num_v_heads, _, chunk, _ = prepared.solve.shape
    _, num_pieces, num_k_heads, head_dim_k = q.shape
    _prepare_kernel[(num_chunks * num_v_heads,)](
        q,
        k,
        g,
        beta,
        cu_seqlens,
        prepared.solve,
        prepared.attend,
        prepared.factors,
        prepared.scratch,
        scale,
        cu_seqlens.shape[0] - 1,
        q.stride(0),
        k.stride(0),
        g.stride(0),
        beta.stride(0),
        H=num_k_heads,
        HV=num_v_heads,
        K=head_dim_k,
        C=chunk,
        P=num_pieces,
        PQ=prepared.attend.shape[2],
        PS=prepared.solve.shape[2],
        SLICE=min(64, max(16, triton.next_power_of_2(head_dim_k))),
        QK_L2NORM=qk_l2norm,
        num_warps=4,
        # Prefetched operands of Q K^T were overwritten before they were read (Triton 3.6, sm_90).
        num_stages=1,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["num_seqs"])
def _prepare_kernel(
    q: tl.tensor,
    k: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    cu_seqlens: tl.tensor,
    solve: tl.tensor,
    attend: tl.tensor,
    factors: tl.tensor,
    scratch: tl.tensor,
    scale: tl.tensor,
    num_seqs: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_g: tl.tensor,
    stride_beta: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    PQ: tl.constexpr,
    PS: tl.constexpr,
    SLICE: tl.constexpr,
    QK_L2NORM: tl.constexpr,
) -> None:
    """One program: one chunk of one value head."""
    chunk = tl.program_id(0) // HV
    head_v = tl.program_id(0) % HV
    head_k = head_v // (HV // H)
    seq = sequence_of_block(cu_seqlens, num_seqs, chunk, C)
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    first_token = first_token_of_block(begin, seq, chunk, C)
    if first_token >= end:
        return

    # Rows past the end have beta 0 and g 0: they change neither state nor outputs.
    row = tl.arange(0, C)
    token = (first_token + row).to(tl.int64)
    mask_t = first_token + row < end
    b_beta = tl.load(beta + token * stride_beta + head_v, mask=mask_t, other=0.0)
    b_g = tl.load(g + token * stride_g + head_v, mask=mask_t, other=0.0)

    # Factors that scale a whole row are kept apart from it, so that its pieces stay what they are.
    squares_k = tl.zeros([C], dtype=tl.float32)
    squares_q = tl.zeros([C], dtype=tl.float32)
    b_kk = tl.zeros([C, C], dtype=tl.float32)
    b_qk = tl.zeros([C, C], dtype=tl.float32)
    tile_k = k + token[:, None] * stride_k + head_k * K
    tile_q = q + token[:, None] * stride_q + head_k * K
    for base in range(0, K, SLICE):
        index_k = base + tl.arange(0, SLICE)[None, :]
        mask_tk = mask_t[:, None] & (index_k < K)
        slice_k = tl.zeros([C, SLICE], dtype=tl.float32)
        slice_q = tl.zeros([C, SLICE], dtype=tl.float32)
        for piece in tl.static_range(P):
            b_k = tl.load(tile_k + piece * H * K + index_k, mask=mask_tk, other=0.0)
            b_q = tl.load(tile_q + piece * H * K + index_k, mask=mask_tk, other=0.0)
            slice_k += b_k.to(tl.float32)
            slice_q += b_q.to(tl.float32)
            for other in tl.static_range(P - piece):
                p_other = tile_k + other * H * K + index_k
                columns = tl.trans(tl.load(p_other, mask=mask_tk, other=0.0))
                b_kk = dot(b_k, columns, b_kk)
                b_qk = dot(b_q, columns, b_qk)
        squares_k += tl.sum(slice_k * slice_k, 1)
        squares_q += tl.sum(slice_q * slice_q, 1)
    norm_k = tl.full([C], 1.0, dtype=tl.float32)
    norm_q = norm_k * scale
    if QK_L2NORM:
        norm_k *= inverse_root(squares_k + 1e-6)
        norm_q *= inverse_root(squares_q + 1e-6)

    place = tl.program_id(0).to(tl.int64)
    p_f = factors + place * 4 * C + row
    total = cumulate(b_g)
    since_start = decay_since_start(total)
    tl.store(p_f, since_start * norm_k)
    tl.store(p_f + C, since_start * norm_q)
    tl.store(p_f + 2 * C, decay_until_end(total, C) * norm_k)
    tl.store(p_f + 3 * C, tl.zeros([C], tl.float32) + decay_of_chunk(total, C))

    decay = decay_between(total, C) * norm_k[None, :]
    square = row[:, None] * C + row[None, :]
    everywhere = row[:, None] < C
    p_attend = attend + place * PQ * C * C + square
    store_pieces(p_attend, b_qk * decay * norm_q[:, None], C * C, PQ, everywhere)
    system = b_kk * decay * (b_beta * norm_k)[:, None]
    system = tl.where(row[:, None] > row[None, :], system, 0.0)
    p_solve = solve + place * PS * C * C + square
    solved = inverse(system, scratch + place * 16 * C, C, PS) * b_beta[None, :]
    store_pieces(p_solve, solved, C * C, PS, everywhere)
