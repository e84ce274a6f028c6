"""Implementation "triton" of the chunk form: systems of all chunks in parallel, then the scan."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.delta_rule._hopper import hopper_prepare, serves
from torch_hybrid.ops.delta_rule._triton_scan import Prepared, launch_chunks
from torch_hybrid.ops.delta_rule._triton_scan_kernel import scan
from torch_hybrid.ops.delta_rule._triton_system import inverse, rounded_inverse
from torch_hybrid.ops.delta_rule.op import GatedDeltaRule
from torch_hybrid.ops.triton.decays import (
    cumulate,
    decay_between,
    decay_of_chunk,
    decay_since_start,
    decay_until_end,
)
from torch_hybrid.ops.triton.devices import is_hopper
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.products import (
    ROUNDED,
    dot,
    in_pieces,
    inverse_root,
    store_pieces,
)
from torch_hybrid.ops.triton.ragged import num_blocks, tokens_of_block
from torch_hybrid.ops.triton.segments import Launch


def chunk_gated_delta_rule(x: GatedDeltaRule, *, is_exact: bool = True) -> Tensor:
    """Launch the chunk form; without ``is_exact`` what reaches a state is rounded to float16."""
    return launch_chunks(x, _prepare, scan, is_exact=is_exact)


def _prepare(x: GatedDeltaRule, pieces: tuple[int, torch.dtype]) -> tuple[Prepared, Launch]:
    """Allocate all that does not depend on a state; the launch fills it."""
    q, k = x.q, x.k
    num_tokens, num_k_heads, head_dim_k = k.shape
    num_v_heads, num_seqs = x.beta.shape[1], x.cu_seqlens.shape[0] - 1
    num_pieces, dtype = pieces
    hopper = is_hopper(q.device) and head_dim_k <= 128
    in_half = dtype == torch.float16
    chunk = 16 if num_pieces == 1 else 64 if hopper and in_half else 32
    shape, rows = (num_blocks(num_tokens, num_seqs, chunk), num_v_heads), (num_tokens, num_v_heads)
    writes_keys = in_half and k.dtype == torch.bfloat16
    keys, attend = k[:, None], q.new_empty(*rows, 1, chunk)
    if writes_keys:
        keys = k.new_empty(num_tokens, 1, num_k_heads, head_dim_k, dtype=dtype)
    elif num_pieces == 3 and k.dtype == torch.float16:
        keys, attend = in_pieces(k), q.new_empty(*rows, 3, chunk, dtype=dtype)
    prepared = Prepared(
        num_pieces=num_pieces,
        queries=q,
        keys=keys,
        solve=q.new_empty(*rows, max(num_pieces, 1), chunk, dtype=dtype),
        attend=attend,
        factors=q.new_empty(*shape, 4, chunk, dtype=torch.float32),
    )
    if serves(prepared, q, k):
        return prepared, hopper_prepare(prepared, x)
    scratch = None
    if num_pieces != ROUNDED.value:
        scratch = q.new_empty(*shape, chunk, 16, dtype=torch.float32)

    def launch(first_block: int, last_block: int) -> None:
        bind(_prepare_kernel, x, prepared)[((last_block - first_block) * num_v_heads,)](
            keys=prepared.keys if writes_keys else None,
            scratch=scratch,
            first_block=first_block,
            C=chunk,
            PA=prepared.attend.shape[2],
            PS=num_pieces,
            SLICE=min(64, max(16, triton.next_power_of_2(head_dim_k))),
            num_warps=2 if num_pieces == 1 else 4,
            # Prefetched operands of Q K^T were overwritten before they were read (Triton 3.6,
            # sm_90).
            num_stages=1,
            # Three programs on a processor instead of two, for 24 bytes that spill: 187 us and
            # not 262.
            maxnreg=168 if chunk == 64 else None,
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
    keys: tl.tensor | None,
    solve: tl.tensor,
    attend: tl.tensor,
    factors: tl.tensor,
    scratch: tl.tensor | None,
    scale: tl.tensor,
    num_seqs: tl.tensor,
    first_block: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_g: tl.tensor,
    stride_beta: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    PA: tl.constexpr,
    PS: tl.constexpr,
    SLICE: tl.constexpr,
    QK_L2NORM: tl.constexpr,
) -> None:
    """Prepare one chunk of one value head: one program.

    The grid is chunks by value heads. Rows are read in slices of K, to sums [C, C] in registers.
    """
    chunk = first_block + tl.program_id(0) // HV
    head_v = tl.program_id(0) % HV
    head_k = head_v // (HV // H)
    _seq, _begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, chunk, C)
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
        b_k = tl.load(tile_k + index_k, mask=mask_tk, other=0.0)
        b_q = tl.load(tile_q + index_k, mask=mask_tk, other=0.0)
        b_kk = dot(b_k, tl.trans(b_k), b_kk)
        b_qk = dot(b_q, tl.trans(b_k), b_qk)
        b_k, b_q = b_k.to(tl.float32), b_q.to(tl.float32)
        squares_k += tl.sum(b_k * b_k, 1)
        squares_q += tl.sum(b_q * b_q, 1)
    norm_k = tl.full([C], 1.0, dtype=tl.float32)
    norm_q = norm_k * scale
    if QK_L2NORM:
        norm_k *= inverse_root(squares_k + 1e-6)
        norm_q *= inverse_root(squares_q + 1e-6)

    # Rows of keys are left as they are, or near 1 by powers of 2, so that few pieces hold them.
    factor_k = norm_k
    if keys is not None:
        bits = tl.minimum(norm_k.to(tl.int32, bitcast=True) & 0x7F800000, 240 << 23)
        factor_k *= ((254 << 23) - bits).to(tl.float32, bitcast=True)
        power = bits.to(tl.float32, bitcast=True)
        if head_v % (HV // H) == 0:
            for base in range(0, K, SLICE):
                index_k = base + tl.arange(0, SLICE)[None, :]
                mask_tk = mask_t[:, None] & (index_k < K)
                b_k = tl.load(tile_k + index_k, mask=mask_tk, other=0.0).to(tl.float32)
                p_keys = keys + (token[:, None] * H + head_k) * K + index_k
                tl.store(p_keys, (b_k * power[:, None]).to(tl.float16), mask=mask_tk)

    place = first_block.to(tl.int64) * HV + tl.program_id(0)
    p_f = factors + place * 4 * C + row
    total = cumulate(b_g, dtype=tl.float32 if PS == ROUNDED else tl.float64)
    since_start = decay_since_start(total)
    tl.store(p_f, since_start * factor_k)
    tl.store(p_f + C, since_start * norm_q)
    tl.store(p_f + 2 * C, decay_until_end(total, C) * factor_k)
    tl.store(p_f + 3 * C, tl.zeros([C], tl.float32) + decay_of_chunk(total, C))

    decay = decay_between(total, C) * norm_k[None, :]
    place_t = first_token.to(tl.int64) * HV + head_v
    p_attend = attend + (place_t * (PA * C) + (row[:, None] * (HV * PA * C) + row[None, :]))
    store_pieces(p_attend, b_qk * decay * norm_q[:, None], C, PA, mask_t[:, None])
    system = b_kk * decay * (b_beta * norm_k)[:, None]
    system = tl.where(row[:, None] > row[None, :], system, 0.0)
    NT: tl.constexpr = max(PS, 1)  # tensors that pieces are in
    p_solve = solve + (first_token.to(tl.int64) * HV + head_v) * (NT * C)
    p_solve += row[:, None] * (HV * NT * C) + row[None, :]
    if PS == ROUNDED:
        solved = rounded_inverse((-system).to(tl.float16), C)
    else:
        solved = inverse(system, scratch + place * 16 * C, C, PS)
    store_pieces(p_solve, solved * b_beta[None, :], C, NT, mask_t[:, None])
