# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton" of the chunk form: rows and systems in parallel, then the scan."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.kimi_delta_attention._triton_scan import Prepared, scan
from torch_hybrid.ops.ragged_chunks import FULL_DECAY
from torch_hybrid.ops.triton.decays import exp
from torch_hybrid.ops.triton.delta_rule import inverse
from torch_hybrid.ops.triton.devices import is_hopper
from torch_hybrid.ops.triton.products import (
    dot,
    exact_dot,
    inverse_root,
    state_pieces,
    store_pieces,
    sum_rows,
)
from torch_hybrid.ops.triton.ragged import first_token_of_block, num_blocks, sequence_of_block

_FULL_DECAY: tl.constexpr = tl.constexpr(FULL_DECAY)
# Decays over 8 rows whose inverses lose nothing of float32 that matters.
_GENTLE: tl.constexpr = tl.constexpr(8.0)


def chunk_kimi_delta_attention(
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
    """Launcher of ``torch_hybrid::chunk_kimi_delta_attention``; its chunks are its own."""
    num_seqs = state_indices.shape[0]
    if num_seqs == 0:
        return torch.zeros_like(v, memory_format=torch.contiguous_format)
    prepared = _prepare(q, k, g, beta, cu_seqlens, qk_l2norm=qk_l2norm)
    slots = initial_indices, state_indices
    return scan(prepared, v, state, cu_seqlens, *slots, scale=scale)


def _prepare(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    qk_l2norm: bool,
) -> Prepared:
    """All that does not depend on a state. Rows of outputs need their dtype's precision alone."""
    num_tokens, num_heads, head_dim_k = q.shape
    num_seqs = cu_seqlens.shape[0] - 1
    num_pieces, dtype = state_pieces(q.dtype, qk_l2norm)
    # As many rows as a scan's registers and shared memory hold, in pieces. A warp takes 16.
    chunk = 32 if num_pieces > 1 and is_hopper(q.device) else 16
    shape = (num_blocks(num_tokens, num_seqs, chunk), num_heads)
    outputs = dtype if num_pieces == 2 else q.dtype
    prepared = Prepared(
        queries=q.new_empty(q.shape, dtype=outputs),
        reads=q.new_empty(num_tokens, num_pieces, *q.shape[1:], dtype=dtype),
        writes=q.new_empty(num_tokens, num_pieces, *q.shape[1:], dtype=dtype),
        solve=q.new_empty(*shape, num_pieces, chunk, chunk, dtype=dtype),
        attend=q.new_empty(*shape, chunk, chunk, dtype=outputs),
        factors=q.new_empty(*shape, head_dim_k, dtype=torch.float32),
    )
    scratch = q.new_empty(*shape, chunk, 16, dtype=torch.float32)
    _prepare_kernel[(shape[0] * num_heads,)](
        q,
        k,
        g,
        beta,
        cu_seqlens,
        prepared.queries,
        prepared.reads,
        prepared.writes,
        prepared.solve,
        prepared.attend,
        prepared.factors,
        scratch,
        num_seqs,
        q.stride(0),
        k.stride(0),
        g.stride(0),
        beta.stride(0),
        H=num_heads,
        K=head_dim_k,
        C=chunk,
        PS=num_pieces,
        BLOCK_K=max(16, triton.next_power_of_2(head_dim_k)),
        SLICE=16,
        QK_L2NORM=qk_l2norm,
        num_warps=2,
        num_stages=1,
        enable_fp_fusion=True,
    )
    return prepared


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
    scratch: tl.tensor,
    num_seqs: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_g: tl.tensor,
    stride_beta: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    PS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICE: tl.constexpr,
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
    token = (first_token + row).to(tl.int64)
    mask_t = first_token + row < end
    norm_k = tl.full([C], 1.0, dtype=tl.float32)
    norm_q = norm_k
    if QK_L2NORM:
        norm_k *= _norm(k + token * stride_k + head * K, mask_t, K, BLOCK_K)
        norm_q *= _norm(q + token * stride_q + head * K, mask_t, K, BLOCK_K)

    place = tl.program_id(0).to(tl.int64)
    later, earlier = row[:, None], row[None, :]
    b_kk = tl.zeros([C, C], dtype=tl.float32)
    b_qk = tl.zeros([C, C], dtype=tl.float32)
    zeros = tl.zeros([C, C], dtype=tl.float32)
    # Outputs of bfloat16 take one piece; bfloat16 has the range of growing decays.
    PQ: tl.constexpr = 1 if q.dtype.element_ty == tl.bfloat16 else PS
    WIDE: tl.constexpr = 1 if PS == 1 else 3
    for base in tl.range(0, K, SLICE, disable_licm=True):
        index_k = base + tl.arange(0, SLICE)[None, :]
        mask_k = index_k < K
        mask_tk = mask_t[:, None] & mask_k
        column = head * K + index_k
        b_k = tl.load(k + token[:, None] * stride_k + column, mask=mask_tk, other=0.0)
        b_q = tl.load(q + token[:, None] * stride_q + column, mask=mask_tk, other=0.0)
        b_g = tl.load(g + token[:, None] * stride_g + column, mask=mask_tk, other=0.0)
        b_k = b_k.to(tl.float32) * norm_k[:, None]
        b_q = b_q.to(tl.float32) * norm_q[:, None]
        b_g = tl.maximum(b_g, _FULL_DECAY)

        # Sums of what lies between two tokens, never differences of longer ones: a small decay
        # survives large ones. In halves of SIZE rows, later rows meet earlier ones between them.
        size = 8
        is_later = (later & size) != 0
        between = ((later ^ earlier) < size) & ((earlier <= later) == is_later)
        log_half = sum_rows(between, b_g, PS)
        first_level = 0
        if tl.min(tl.min(log_half, 1), 0) > -_GENTLE:
            # All pairs of 16 rows at once: growing decays stay small.
            half = exp(log_half)
            back = exp(-log_half)
            towards = tl.where(is_later, half, back)
            away = tl.where(is_later, back, half)
            meets = (later >> 4 == earlier >> 4) & (later > earlier)
            columns = tl.trans(b_k * away)
            product = exact_dot(b_k * towards, columns, zeros, WIDE)
            b_kk += tl.where(meets, product, 0.0)
            if PQ == 1 and PS > 1:
                product = dot((b_q * towards).to(tl.bfloat16), columns.to(tl.bfloat16), zeros)
            else:
                product = exact_dot(b_q * towards, columns, zeros, WIDE)
            b_qk += tl.where(meets | (later == earlier), product, 0.0)
            first_level = 4
        else:
            own = tl.sum(b_q * b_k, 1)
            b_qk += tl.where(later == earlier, own[:, None], 0.0)
        for level in range(first_level, 5 if C == 32 else 4):
            size = 1 << level
            is_later = (later & size) != 0
            between = ((later ^ earlier) < size) & ((earlier <= later) == is_later)
            decay = exp(sum_rows(between, b_g, PS))
            slice_k = b_k * decay
            slice_q = b_q * decay
            meets = ((later ^ earlier) >> level == 1) & is_later
            product = exact_dot(slice_k, tl.trans(slice_k), zeros, PS)
            b_kk += tl.where(meets, product, 0.0)
            if PQ == 1 and PS > 1:
                columns = tl.trans(slice_k.to(tl.bfloat16))
                product = dot(slice_q.to(tl.bfloat16), columns, zeros)
            else:
                product = exact_dot(slice_q, tl.trans(slice_k), zeros, PS)
            b_qk += tl.where(meets, product, 0.0)

        since_start = exp(sum_rows(earlier <= later, b_g, PS))
        tile_q = token[:, None] * (H * K) + column
        tile_k = token[:, None] * (PS * H * K) + column
        store_pieces(queries + tile_q, b_q * since_start, H * K, 1, mask_tk)
        store_pieces(reads + tile_k, b_k * since_start, H * K, PS, mask_tk)
        whole = tl.sum(tl.where(later == C - 1, since_start, 0.0), 0)[None, :]
        tl.store(factors + place * K + index_k, whole, mask=mask_k)
        until_end = exp(sum_rows(earlier > later, b_g, PS))
        store_pieces(writes + tile_k, b_k * until_end, H * K, PS, mask_tk)

    square = later * C + earlier
    everywhere = later < C
    store_pieces(attend + place * C * C + square, b_qk, C * C, 1, everywhere)
    b_beta = tl.load(beta + token * stride_beta + head, mask=mask_t, other=0.0)
    b_solve = inverse(b_kk * b_beta[:, None], scratch + place * 16 * C, C, PS) * b_beta[None, :]
    store_pieces(solve + place * PS * C * C + square, b_solve, C * C, PS, everywhere)


@triton.jit
def _norm(rows: tl.tensor, mask_t: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """What scales each row to unit length."""
    index_k = tl.arange(0, BLOCK_K)[None, :]
    x = tl.load(rows[:, None] + index_k, mask=mask_t[:, None] & (index_k < K), other=0.0)
    x = x.to(tl.float32)
    return inverse_root(tl.sum(x * x, 1) + 1e-6)
