# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton" of the chunk form: rows and systems in parallel, then the scan."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.ragged_chunks import FULL_DECAY
from torch_hybrid.ops.triton_decays import exp
from torch_hybrid.ops.triton_delta_rule import Prepared, Rows, inverse, scan
from torch_hybrid.ops.triton_products import (
    piece_dtype,
    pieces_of_outputs,
    pieces_of_states,
    store_pieces,
)
from torch_hybrid.ops.triton_ragged import first_token_of_block, sequence_of_block

_FULL_DECAY: tl.constexpr = tl.constexpr(FULL_DECAY)
# Tokens of a chunk, whatever the caller wants: in a longer one the products of its blocks need
# more registers than there are.
_CHUNK = 16


def chunk_kimi_delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    *,
    scale: float,
    qk_l2norm: bool,
    chunk_size: int,
) -> Tensor:
    """Launcher of ``torch_hybrid::chunk_kimi_delta_attention``; chunks are of 16 tokens."""
    num_seqs = state_indices.shape[0]
    if num_seqs == 0:
        return torch.zeros_like(v, memory_format=torch.contiguous_format)
    prepared, rows = _prepare(q, k, g, beta, cu_seqlens, scale=scale, qk_l2norm=qk_l2norm)
    return scan(prepared, rows, v, state, cu_seqlens, state_indices, has_initial_state)


def _prepare(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Prepared, Rows]:
    """All that does not depend on a state. Rows of outputs need their dtype's precision alone."""
    _, num_heads, head_dim_k = q.shape
    num_seqs = cu_seqlens.shape[0] - 1
    prepared = Prepared.empty(q, num_seqs, num_heads, _CHUNK, factors=(head_dim_k,))
    num_chunks, num_pieces = prepared.factors.shape[0], pieces_of_states(q.dtype)
    dtype = piece_dtype(q.dtype)
    rows = Rows(
        queries=q.new_empty(pieces_of_outputs(q.dtype), *q.shape, dtype=dtype),
        reads=q.new_empty(num_pieces, *q.shape, dtype=dtype),
        writes=q.new_empty(num_pieces, *q.shape, dtype=dtype),
    )
    _prepare_kernel[(num_chunks * num_heads,)](
        q,
        k,
        g,
        beta,
        cu_seqlens,
        rows.queries,
        rows.reads,
        rows.writes,
        prepared.solve,
        prepared.attend,
        prepared.factors,
        scale,
        num_seqs,
        q.stride(0),
        k.stride(0),
        g.stride(0),
        beta.stride(0),
        rows.reads.stride(0),
        prepared.solve.stride(0),
        H=num_heads,
        K=head_dim_k,
        C=_CHUNK,
        PQ=rows.queries.shape[0],
        PS=num_pieces,
        BLOCK_K=max(16, triton.next_power_of_2(head_dim_k)),
        QK_L2NORM=qk_l2norm,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return prepared, rows


@triton.jit(do_not_specialize=["num_seqs"])
def _prepare_kernel(
    q: tl.tensor,
    k: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    cu_seqlens: tl.tensor,
    queries: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    solve: tl.tensor,
    attend: tl.tensor,
    factors: tl.tensor,
    scale: tl.tensor,
    num_seqs: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_g: tl.tensor,
    stride_beta: tl.tensor,
    stride_rows: tl.tensor,
    stride_square: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    PQ: tl.constexpr,
    PS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    QK_L2NORM: tl.constexpr,
) -> None:
    """One program: one chunk of one head."""
    chunk = tl.program_id(0) // H
    head = tl.program_id(0) % H
    seq = sequence_of_block(cu_seqlens, num_seqs, chunk, C)
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    first_token = first_token_of_block(begin, seq, chunk, C)
    if first_token >= end:
        return

    # Rows past the end have beta 0, k 0 and g 0: they change neither state nor outputs.
    row = tl.arange(0, C)
    index_k = tl.arange(0, BLOCK_K)
    token = (first_token + row).to(tl.int64)
    mask_t = first_token + row < end
    mask_k = (index_k < K)[None, :]
    mask_tk = mask_t[:, None] & mask_k
    column = head * K + index_k[None, :]
    p_k = k + token[:, None] * stride_k + column
    p_g = g + token[:, None] * stride_g + column
    b_k = tl.load(p_k, mask=mask_tk, other=0.0).to(tl.float32)
    b_q = tl.load(q + token[:, None] * stride_q + column, mask=mask_tk, other=0.0).to(tl.float32)
    norm_k = tl.full([C], 1.0, dtype=tl.float32)
    norm_q = norm_k * scale
    if QK_L2NORM:
        norm_k = tl.div_rn(norm_k, tl.sqrt_rn(tl.sum(b_k * b_k, 1) + 1e-6))
        norm_q = tl.div_rn(norm_q, tl.sqrt_rn(tl.sum(b_q * b_q, 1) + 1e-6))
    b_q *= norm_q[:, None]

    # By the distance of two tokens, whose decay grows a row at a time.
    b_kk = tl.zeros([C, C], dtype=tl.float32)
    b_qk = tl.where(row[:, None] == row[None, :], tl.sum(b_q * b_k, 1)[:, None], 0.0)
    between = tl.zeros([C, BLOCK_K], dtype=tl.float32)
    for distance in range(1, C):
        is_pair = mask_t & (row >= distance)
        mask_pair = is_pair[:, None] & mask_k
        between += _load_decays(p_g - (distance - 1) * stride_g, mask_pair)
        earlier = tl.load(p_k - distance * stride_k, mask=mask_pair, other=0.0).to(tl.float32)
        earlier *= exp(between)
        is_here = is_pair[:, None] & (row[:, None] == row[None, :] + distance)
        b_kk = tl.where(is_here, tl.sum(b_k * earlier, 1)[:, None], b_kk)
        b_qk = tl.where(is_here, tl.sum(b_q * earlier, 1)[:, None], b_qk)

    b_g = _load_decays(p_g, mask_tk)
    mask_later = mask_k & ((first_token + row + 1 < end) & (row + 1 < C))[:, None]
    g_later = _load_decays(p_g + stride_g, mask_later)
    since_start = exp(tl.cumsum(b_g, 0))
    # Sums of what lies between, not differences of sums: a small decay survives large ones.
    until_end = exp(tl.cumsum(g_later, 0, reverse=True))

    place = tl.program_id(0).to(tl.int64)
    # Of the whole chunk in float64: its errors stay in the state, chunk after chunk.
    whole = tl.exp(tl.sum(b_g, 0).to(tl.float64)).to(tl.float32)
    tl.store(factors + place * K + index_k, whole, mask=index_k < K)
    tile = token[:, None] * (H * K) + column
    b_k *= norm_k[:, None]
    store_pieces(queries + tile, b_q * since_start, stride_rows, PQ, mask_tk)
    store_pieces(reads + tile, b_k * since_start, stride_rows, PS, mask_tk)
    store_pieces(writes + tile, b_k * until_end, stride_rows, PS, mask_tk)

    square = place * C * C + row[:, None] * C + row[None, :]
    everywhere = row[:, None] < C
    store_pieces(attend + square, b_qk * norm_k[None, :], stride_square, PQ, everywhere)
    b_beta = tl.load(beta + token * stride_beta + head, mask=mask_t, other=0.0)
    system = b_kk * (b_beta * norm_k)[:, None] * norm_k[None, :]
    b_solve = inverse(system, C, PS) * b_beta[None, :]
    store_pieces(solve + square, b_solve, stride_square, PS, everywhere)


@triton.jit
def _load_decays(pointer: tl.tensor, mask: tl.tensor) -> tl.tensor:
    return tl.maximum(tl.load(pointer, mask=mask, other=0.0), _FULL_DECAY)
