"""Implementation "triton" of the chunk form: rows and systems in parallel, then the scan."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.delta_rule._triton_scan import Prepared, launch_chunks
from torch_hybrid.ops.delta_rule._triton_scan_kernel import scan
from torch_hybrid.ops.delta_rule._triton_system import inverse, rounded_inverse
from torch_hybrid.ops.delta_rule.op import KimiDeltaAttention
from torch_hybrid.ops.ragged_chunks import FULL_DECAY
from torch_hybrid.ops.triton.decays import MOST_FIXED, exp, fixed_decay, fixed_exp
from torch_hybrid.ops.triton.devices import is_hopper
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.products import (
    ROUNDED,
    dot,
    exact_dot,
    inverse_root,
    store_pieces,
    sum_rows,
)
from torch_hybrid.ops.triton.ragged import num_blocks, tokens_of_block
from torch_hybrid.ops.triton.segments import Launch

_FULL_DECAY: tl.constexpr = tl.constexpr(FULL_DECAY)
# Powers of 2 by which factors may grow, of which bfloat16 then has all three pieces.
_MOST_GROWTH: tl.constexpr = tl.constexpr(96 << 23)


def chunk_kimi_delta_attention(x: KimiDeltaAttention, *, is_exact: bool = True) -> Tensor:
    """Launch the chunk form; without ``is_exact`` what reaches a state is rounded to float16."""
    return launch_chunks(x, _prepare, scan, is_exact=is_exact)


def _prepare(x: KimiDeltaAttention, pieces: tuple[int, torch.dtype]) -> tuple[Prepared, Launch]:
    """Allocate all that does not depend on a state; the launch fills it.

    Rows of outputs need their dtype's precision alone.
    """
    q = x.q
    num_tokens, num_heads, head_dim_k = q.shape
    num_seqs = x.cu_seqlens.shape[0] - 1
    num_pieces, dtype = pieces
    num_tensors = max(num_pieces, 1)
    # As many rows as a scan's registers and shared memory hold, in pieces. A warp takes 16.
    chunk = 32 if num_pieces != 1 and is_hopper(q.device) else 16
    shape = (num_blocks(num_tokens, num_seqs, chunk), num_heads)
    outputs = q.dtype if dtype == torch.bfloat16 else dtype
    prepared = Prepared(
        num_pieces=num_pieces,
        queries=q.new_empty(q.shape, dtype=outputs),
        keys=q.new_empty(num_tokens, num_tensors, *q.shape[1:], dtype=dtype),
        writes=q.new_empty(num_tokens, num_tensors, *q.shape[1:], dtype=dtype),
        solve=q.new_empty(num_tokens, num_heads, num_tensors, chunk, dtype=dtype),
        attend=q.new_empty(num_tokens, num_heads, 1, chunk, dtype=outputs),
        factors=q.new_empty(*shape, head_dim_k, dtype=torch.float32),
    )
    scratch = None
    if num_pieces != ROUNDED.value:
        scratch = q.new_empty(*shape, chunk, 16, dtype=torch.float32)
    block_k = max(16, triton.next_power_of_2(head_dim_k))

    def launch(first_block: int, last_block: int) -> None:
        bind(_prepare_kernel, x, prepared)[((last_block - first_block) * num_heads,)](
            reads=prepared.keys,
            scratch=scratch,
            first_block=first_block,
            C=chunk,
            PS=num_pieces,
            BLOCK_K=block_k,
            SLICE=min(block_k, 32 if num_pieces != 1 else 16),
            num_warps=2,
            num_stages=1,
            enable_fp_fusion=True,
        )

    return prepared, launch


@triton.jit(do_not_specialize=["num_seqs", "first_block"])
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
    scratch: tl.tensor | None,
    num_seqs: tl.tensor,
    first_block: tl.tensor,
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
    """Prepare one chunk of one head: one program of two warps.

    The grid is chunks by heads. Rows are read in slices of K, to sums [C, C] in registers.
    """
    NT: tl.constexpr = max(PS, 1)  # tensors that pieces are in
    chunk = first_block + tl.program_id(0) // H
    head = tl.program_id(0) % H
    _seq, _begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, chunk, C)
    if first_token >= end:
        return

    # Rows past the end have beta 0, k 0 and g 0: they change neither state nor outputs.
    row = tl.arange(0, C)
    token = (first_token + row).to(tl.int64)
    mask_t = first_token + row < end
    norm_k = _norm(k + token * stride_k + head * K, mask_t, K, BLOCK_K, QK_L2NORM)
    norm_q = _norm(q + token * stride_q + head * K, mask_t, K, BLOCK_K, QK_L2NORM)

    place = first_block.to(tl.int64) * H + tl.program_id(0)
    later, earlier = row[:, None], row[None, :]
    b_kk = tl.zeros([C, C], dtype=tl.float32)
    b_qk = tl.zeros([C, C], dtype=tl.float32)
    # Decays of a chunk about its middle are integers whose sums are exact. Rows towards it and away
    # from it grow where they lie before it: all pairs of rows meet in one product.
    lowest = tl.zeros([C], dtype=tl.float32)
    growth = tl.zeros([1, SLICE], dtype=tl.int32)
    for base in tl.range(0, K, SLICE, disable_licm=True):
        index_k = base + tl.arange(0, SLICE)[None, :]
        mask_k = (index_k < K) | (K % SLICE == 0)
        mask_tk = mask_t[:, None] & mask_k
        column = head * K + index_k
        b_k = tl.load(k + token[:, None] * stride_k + column, mask=mask_tk, other=0.0)
        b_q = tl.load(q + token[:, None] * stride_q + column, mask=mask_tk, other=0.0)
        b_g = tl.load(g + token[:, None] * stride_g + column, mask=mask_tk, other=0.0)
        steps = fixed_decay(b_g)
        before = tl.sum(tl.where(later < C // 2, steps, 0), 0)[None, :]
        after = tl.sum(steps, 0)[None, :] - before
        since_middle = tl.cumsum(steps, 0) - before
        lowest = tl.minimum(lowest, tl.min(b_g, 1))
        growth = tl.minimum(growth, tl.minimum(before, after))

        towards, away = fixed_exp(since_middle), fixed_exp(-since_middle)
        b_q = b_q.to(tl.float32) * norm_q[:, None] * towards
        b_k = b_k.to(tl.float32) * norm_k[:, None]
        columns = b_k * away
        b_k *= towards
        b_kk, b_qk = _meet(b_q, b_k, columns, b_kk, b_qk, q.dtype.element_ty, PS)
        before, after = fixed_exp(before), fixed_exp(after)
        tile_q = token[:, None] * (H * K) + column
        tile_k = token[:, None] * (NT * H * K) + column
        store_pieces(queries + tile_q, b_q * before, H * K, 1, mask_tk)
        store_pieces(reads + tile_k, b_k * before, H * K, NT, mask_tk)
        store_pieces(writes + tile_k, columns * after, H * K, NT, mask_tk)
        tl.store(factors + place * K + index_k, before * after, mask=mask_k)
    b_kk = tl.where(later > earlier, b_kk, 0.0)
    b_qk = tl.where(later >= earlier, b_qk, 0.0)

    # Once more where that would overflow.
    if (tl.min(lowest, 0) < MOST_FIXED) | (tl.min(tl.min(growth, 1), 0) < -_MOST_GROWTH):
        # Read again: no register holds them through the loop above.
        norm_k = _norm(k + token * stride_k + head * K, mask_t, K, BLOCK_K, QK_L2NORM)
        norm_q = _norm(q + token * stride_q + head * K, mask_t, K, BLOCK_K, QK_L2NORM)
        b_kk = tl.zeros([C, C], dtype=tl.float32)
        b_qk = tl.zeros([C, C], dtype=tl.float32)
        for base in tl.range(0, K, 16, disable_licm=True):
            index_k = base + tl.arange(0, 16)[None, :]
            mask_k = index_k < K
            mask_tk = mask_t[:, None] & mask_k
            column = head * K + index_k
            b_k = tl.load(k + token[:, None] * stride_k + column, mask=mask_tk, other=0.0)
            b_q = tl.load(q + token[:, None] * stride_q + column, mask=mask_tk, other=0.0)
            b_g = tl.load(g + token[:, None] * stride_g + column, mask=mask_tk, other=0.0)
            b_k = b_k.to(tl.float32) * norm_k[:, None]
            b_q = b_q.to(tl.float32) * norm_q[:, None]
            b_g = tl.maximum(b_g, _FULL_DECAY)
            b_kk, b_qk = _meet_in_halves(b_q, b_k, b_g, b_kk, b_qk, q.dtype.element_ty, PS)
            since_start = exp(sum_rows(earlier <= later, b_g, PS))
            tile_q = token[:, None] * (H * K) + column
            tile_k = token[:, None] * (NT * H * K) + column
            store_pieces(queries + tile_q, b_q * since_start, H * K, 1, mask_tk)
            store_pieces(reads + tile_k, b_k * since_start, H * K, NT, mask_tk)
            whole = tl.sum(tl.where(later == C - 1, since_start, 0.0), 0)[None, :]
            tl.store(factors + place * K + index_k, whole, mask=mask_k)
            until_end = exp(sum_rows(earlier > later, b_g, PS))
            store_pieces(writes + tile_k, b_k * until_end, H * K, NT, mask_tk)

    place_t = first_token.to(tl.int64) * H + head
    store_pieces(attend + place_t * C + later * (H * C) + earlier, b_qk, C, 1, mask_t[:, None])
    b_beta = tl.load(beta + token * stride_beta + head, mask=mask_t, other=0.0)
    if PS == ROUNDED:
        b_solve = rounded_inverse((-b_kk * b_beta[:, None]).to(tl.float16), C)
    else:
        b_solve = inverse(b_kk * b_beta[:, None], scratch + place * 16 * C, C, PS)
    b_solve *= b_beta[None, :]
    p_solve = solve + place_t * (NT * C) + later * (H * NT * C) + earlier
    store_pieces(p_solve, b_solve, C, NT, mask_t[:, None])


@triton.jit
def _meet(
    queries: tl.tensor,
    keys: tl.tensor,
    columns: tl.tensor,
    b_kk: tl.tensor,
    b_qk: tl.tensor,
    dtype: tl.constexpr,
    PS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Multiply rows decayed (or grown) towards a token and away from it, and add to sums."""
    PIECES: tl.constexpr = 1 if PS == 1 else 3
    if PS == ROUNDED:
        # TF32 has the digits of float16 and the range of growing decays.
        b_kk = tl.dot(keys, tl.trans(columns), b_kk, input_precision="tf32")
    else:
        b_kk = exact_dot(keys, tl.trans(columns), b_kk, PIECES)
    # Outputs of bfloat16 take one piece; bfloat16 has the range of growing decays.
    if dtype == tl.bfloat16 and PS != 1:
        b_qk = dot(queries.to(tl.bfloat16), tl.trans(columns.to(tl.bfloat16)), b_qk)
    else:
        b_qk = exact_dot(queries, tl.trans(columns), b_qk, PIECES)
    return b_kk, b_qk


@triton.jit
def _meet_in_halves(
    b_q: tl.tensor,
    b_k: tl.tensor,
    b_g: tl.tensor,
    b_kk: tl.tensor,
    b_qk: tl.tensor,
    dtype: tl.constexpr,
    PS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Multiply rows that may decay by any number, and add to sums.

    Sums of what lies between two tokens, never differences of longer ones: a small decay survives
    large ones. In halves of SIZE rows, later rows meet earlier ones between them.
    """
    C: tl.constexpr = b_k.shape[0]
    row = tl.arange(0, C)
    later, earlier = row[:, None], row[None, :]
    zeros = tl.zeros([C, C], dtype=tl.float32)
    own = tl.sum(b_q * b_k, 1)
    b_qk += tl.where(later == earlier, own[:, None], 0.0)
    for level in range(5 if C == 32 else 4):
        size = 1 << level
        is_later = (later & size) != 0
        between = ((later ^ earlier) < size) & ((earlier <= later) == is_later)
        decay = exp(sum_rows(between, b_g, PS))
        slice_k = b_k * decay
        meets = ((later ^ earlier) >> level == 1) & is_later
        kk, qk = _meet(b_q * decay, slice_k, slice_k, zeros, zeros, dtype, PS)
        b_kk += tl.where(meets, kk, 0.0)
        b_qk += tl.where(meets, qk, 0.0)
    return b_kk, b_qk


@triton.jit
def _norm(
    rows: tl.tensor,
    mask_t: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    QK_L2NORM: tl.constexpr,
) -> tl.tensor:
    """Compute what scales each row to unit length, or 1."""
    norm = tl.full([rows.shape[0]], 1.0, dtype=tl.float32)
    if QK_L2NORM:
        index_k = tl.arange(0, BLOCK_K)[None, :]
        x = tl.load(rows[:, None] + index_k, mask=mask_t[:, None] & (index_k < K), other=0.0)
        x = x.to(tl.float32)
        norm = inverse_root(tl.sum(x * x, 1) + 1e-6)
    return norm
