# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton" of Kimi delta attention's backward: six launches, chunks of C tokens.

The formulas are those of ``_triton_gated.py``, with decays by channel inside the products.

1. ``_rows_kernel``: sums of log decays, and rows decayed by those.
2. ``_systems_kernel``: N and decayed products of q and k, of pairs of rows that meet.
3. Two walks (``_triton_walks.py``): states and their gradients.
4. ``_products_kernel``: gradients of the products of q and k, of v and of beta.
5. ``_inputs_kernel``: gradients of q, k and g.

Rows i and j meet in the middle between them: i lies in the later half of a block of rows, j in the
earlier one. Both carry the decay to the middle, which is at most 1, so no exponential overflows.
Blocks of 16 rows and more meet as tiles; in a block all later halves of one size meet at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.delta_rule._triton_system import inverse, rounded_inverse
from torch_hybrid.ops.delta_rule.training._triton_unit_rows import unit_rows
from torch_hybrid.ops.delta_rule.training._triton_walks import (
    Rows,
    empty_walked,
    rows_of_v,
    walk_gradients,
    walk_states,
)
from torch_hybrid.ops.delta_rule.training.op import TrainedKimiDeltaAttention
from torch_hybrid.ops.triton.decays import exp
from torch_hybrid.ops.triton.devices import is_hopper
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.products import NUM_PIECES, dot
from torch_hybrid.ops.triton.ragged import num_blocks, place_of_state, tokens_of_block

_PIECES: tl.constexpr = tl.constexpr(NUM_PIECES)
# A log decay of which float32 has 0 left: sums of larger ones would lose digits of small ones.
_NOTHING_LEFT: tl.constexpr = tl.constexpr(-128.0)


@without_autocast
def kimi_delta_attention_backward(x: TrainedKimiDeltaAttention) -> tuple[Tensor, ...]:
    """Compute the gradients of q, k, v, g, beta and the initial state."""
    unit = unit_rows(x)
    q, k, v, g, beta = unit.q, unit.k, x.v, x.g, x.beta
    num_tokens, num_heads, k_dim = k.shape
    dq, dk, _, dg, dbeta = grads = tuple(each.new_empty(each.shape) for each in (q, k, v, g, beta))
    dinitial = x.states(0) if x.initial_state is None else torch.empty_like(x.initial_state)
    if x.num_seqs == 0:
        return *(each.zero_() for each in grads), dinitial
    exact = k.dtype == torch.float32
    chunk = 64 if not exact and k_dim <= 128 else 32
    programs = num_blocks(num_tokens, x.num_seqs, chunk) * num_heads
    block_k = min(32, max(16, triton.next_power_of_2(k_dim)))
    blocks_k = triton.cdiv(k_dim, block_k)
    queries, reads, writes = (k.new_empty(k.shape) for _ in range(3))
    # Differences of two sums must keep a small decay between them: float32 beside bfloat16.
    totals = k.new_empty(k.shape, dtype=torch.float64 if exact else torch.float32)
    of_k = {"C": chunk, "BLOCK_K": block_k, "enable_fp_fusion": True}
    bind(_rows_kernel, x)[(programs * blocks_k,)](
        q=q, k=k, totals=totals, queries=queries, reads=reads, writes=writes, **of_k, num_warps=4
    )
    square = num_tokens, num_heads, chunk
    solve, attend, d_system, d_attend = (k.new_empty(square) for _ in range(4))
    bind(_systems_kernel, x)[(programs,)](
        q=q,
        k=k,
        totals=totals,
        solve=solve,
        attend=attend,
        among=k.new_empty(square, dtype=torch.float32 if exact else torch.float16),
        scratch=k.new_empty(programs, chunk, 16) if exact else None,
        **of_k,
        num_warps=4,
        num_stages=1,
        # Three programs on a processor: 689 us of 1x8192 and 32 heads instead of 763.
        maxnreg=168 if chunk == 64 and is_hopper(q.device) else None,
    )
    rows = Rows(
        queries=queries, reads=reads, writes=writes, decays=totals, solve=solve, attend=attend
    )
    sizes = {"C": chunk, "BLOCK_K": max(16, triton.next_power_of_2(k_dim))}
    walked = empty_walked(x, chunk)
    walk_states(x, rows, walked, sizes)
    walk_gradients(x, rows, walked, (*grads, dinitial), sizes)
    block_v, stride_o = min(32, rows_of_v(v.shape[2])), x.dout.stride(0)
    bind(_products_kernel, x, walked)[(programs,)](
        d_system=d_system,
        d_attend=d_attend,
        dbeta=dbeta,
        stride_o=stride_o,
        C=chunk,
        BLOCK_V=block_v,
        num_warps=4,
        enable_fp_fusion=True,
    )
    bind(_inputs_kernel, x, walked)[(programs * blocks_k,)](
        q=q,
        k=k,
        totals=totals,
        states=walked.states,
        d_system=d_system,
        d_attend=d_attend,
        dq=dq,
        dk=dk,
        dg=dg,
        stride_o=stride_o,
        **of_k,
        BLOCK_V=block_v,
        STARTS=x.initial_state is not None,
        ENDS=x.dfinal_state is not None,
        num_warps=4,
        num_stages=2,
    )
    unit.unnormalise(dq, dk)
    return *grads, dinitial


@triton.jit(do_not_specialize=["num_seqs"])
def _rows_kernel(
    q: tl.tensor,
    k: tl.tensor,
    g: tl.tensor,
    cu_seqlens: tl.tensor,
    totals: tl.tensor,
    queries: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    scale: tl.tensor,
    num_seqs: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_g: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Decay one chunk's rows of BLOCK_K channels of a head, all [T, H, K]: one program.

    The grid is chunks by heads by blocks of channels.
    """
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    chunk = tl.program_id(0) // (H * BLOCKS)
    head = tl.program_id(0) // BLOCKS % H
    _seq, _begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, chunk, C)
    if first_token >= end:
        return
    row = tl.arange(0, C)
    token = (first_token + row).to(tl.int64)[:, None]
    index_k = (tl.program_id(0) % BLOCKS * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    mask = (first_token + row < end)[:, None] & (index_k < K)
    column = head * K + index_k
    b_q = tl.load(q + token * stride_q + column, mask=mask, other=0.0).to(tl.float32)
    b_k = tl.load(k + token * stride_k + column, mask=mask, other=0.0).to(tl.float32)
    b_g = tl.load(g + token * stride_g + column, mask=mask, other=0.0)
    total = tl.cumsum(tl.maximum(b_g, _NOTHING_LEFT).to(totals.dtype.element_ty), 0)
    last = tl.sum(tl.where(row[:, None] == C - 1, total, 0.0), 0)[None, :]
    since_start = exp(total.to(tl.float32))
    place = token * H * K + column
    dtype: tl.constexpr = k.dtype.element_ty
    tl.store(totals + place, total, mask=mask)
    tl.store(queries + place, (b_q * since_start * scale).to(dtype), mask=mask)
    tl.store(reads + place, (b_k * since_start).to(dtype), mask=mask)
    tl.store(writes + place, (b_k * exp((last - total).to(tl.float32))).to(dtype), mask=mask)


@triton.jit
def _is_late(row: tl.tensor, half: tl.tensor) -> tl.tensor:
    """Tell whether rows lie in the later halves of blocks of two times half."""
    return (row & half) != 0


@triton.jit
def _to_middle(
    total: tl.tensor,
    p_total: tl.tensor,
    row: tl.tensor,
    size: tl.tensor,
    mask_k: tl.tensor,
    stride: tl.constexpr,
    half: tl.tensor,
) -> tl.tensor:
    """Decay of rows [B, 16, .] to or from the middle of their block of two times half rows."""
    middle = (row & -2 * half) + half - 1
    mask = (middle < size) & mask_k
    between = total - tl.load(p_total + middle * stride, mask=mask, other=0.0)
    between = tl.where(_is_late(row, half), between, -between).to(tl.float32)
    # Past the end of a sequence nobody meets; all else is at most 0 but for rounding.
    return exp(tl.minimum(between, 0.0))


@triton.jit(do_not_specialize=["num_seqs"])
def _systems_kernel(
    q: tl.tensor,
    k: tl.tensor,
    totals: tl.tensor,
    beta: tl.tensor,
    cu_seqlens: tl.tensor,
    solve: tl.tensor,
    attend: tl.tensor,
    among: tl.tensor,
    scratch: tl.tensor | None,
    scale: tl.tensor,
    num_seqs: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_beta: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Multiply the rows of one chunk and head with each other, and solve: one program.

    The grid is chunks by heads. ``solve``, ``attend`` and ``among``, the products of k, [T, H, C].
    Products of tiles [16, BLOCK_K] are summed over K in registers.
    """
    chunk = tl.program_id(0) // H
    head = tl.program_id(0) % H
    _seq, _begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, chunk, C)
    if first_token >= end:
        return
    size = tl.minimum(end - first_token, C)
    B: tl.constexpr = C // 16
    dtype: tl.constexpr = k.dtype.element_ty
    first = first_token.to(tl.int64)
    p_q = q + first * stride_q + head * K
    p_k = k + first * stride_k + head * K
    p_total = totals + (first * H + head) * K
    place = (first * H + head) * C
    later = tl.arange(0, B)[:, None, None] * 16 + tl.arange(0, 16)[None, :, None]
    earlier = tl.arange(0, B)[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]
    index_k = tl.arange(0, BLOCK_K)[None, None, :]
    zeros = tl.zeros([B, 16, 16], dtype=tl.float32)

    b_kk, b_qk = zeros, zeros
    for base in range(0, K, BLOCK_K):
        column = base + index_k
        is_here = (later < size) & (column < K)
        b_k = tl.load(p_k + later * stride_k + column, mask=is_here, other=0.0).to(tl.float32)
        b_q = tl.load(p_q + later * stride_q + column, mask=is_here, other=0.0).to(tl.float32)
        total = tl.load(p_total + later * (H * K) + column, mask=is_here, other=0.0)
        own = tl.sum(b_q * b_k, 2)
        b_qk += tl.where(later == earlier, own[:, :, None], 0.0)
        for level in tl.static_range(4):
            p_column = p_total + column
            decay = _to_middle(total, p_column, later, size, column < K, H * K, 1 << level)
            x = (b_k * decay).to(dtype)
            right = tl.permute(x, (0, 2, 1))
            meets = ((later ^ earlier) >> level == 1) & _is_late(later, 1 << level)
            b_kk += tl.where(meets, dot(x, right, zeros), 0.0)
            b_qk += tl.where(meets, dot((b_q * decay).to(dtype), right, zeros), 0.0)
    p_square = place + later * (H * C) + earlier
    mask = later < size
    tl.store(among + p_square, b_kk.to(among.dtype.element_ty), mask=mask)
    tl.store(attend + p_square, (b_qk * scale).to(dtype), mask=mask)
    for other in tl.static_range(1, B):
        partner = later ^ (16 * other)
        b_kk, b_qk = zeros, zeros
        for base in range(0, K, BLOCK_K):
            column = base + index_k
            p_column = p_total + column
            is_here = (later < size) & (column < K)
            b_k = tl.load(p_k + later * stride_k + column, mask=is_here, other=0.0).to(tl.float32)
            b_q = tl.load(p_q + later * stride_q + column, mask=is_here, other=0.0).to(tl.float32)
            total = tl.load(p_column + later * (H * K), mask=is_here, other=0.0)
            decay = _to_middle(total, p_column, later, size, column < K, H * K, 16 << other // 2)
            is_here = (partner < size) & (column < K)
            x = tl.load(p_k + partner * stride_k + column, mask=is_here, other=0.0).to(tl.float32)
            total = tl.load(p_column + partner * (H * K), mask=is_here, other=0.0)
            x *= _to_middle(total, p_column, partner, size, column < K, H * K, 16 << other // 2)
            right = tl.permute(x.to(dtype), (0, 2, 1))
            b_kk = dot((b_k * decay).to(dtype), right, b_kk)
            b_qk = dot((b_q * decay).to(dtype), right, b_qk)
        p_square = place + later * (H * C) + (earlier ^ (16 * other))
        mask = later < size
        # What an early row would be to a later one is 0.
        b_kk = tl.where(_is_late(later, 16 << other // 2), b_kk, 0.0)
        b_qk = tl.where(_is_late(later, 16 << other // 2), b_qk * scale, 0.0)
        tl.store(among + p_square, b_kk.to(among.dtype.element_ty), mask=mask)
        tl.store(attend + p_square, b_qk.to(dtype), mask=mask)
    tl.debug_barrier()

    row = tl.arange(0, C)
    mask_t = row < size
    b_beta = tl.load(beta + (first + row) * stride_beta + head, mask=mask_t, other=0.0)
    square = place + row[:, None] * (H * C) + row[None, :]
    b_kk = tl.load(among + square, mask=mask_t[:, None], other=0.0)
    system = b_kk.to(tl.float32) * b_beta[:, None]
    zeros_c = tl.zeros([C, C], dtype=tl.float32)
    if dtype == tl.float32:
        p_scratch = scratch + tl.program_id(0).to(tl.int64) * 16 * C
        solved = dot(b_kk, inverse(system, p_scratch, C, _PIECES), zeros_c)
    else:
        solved = rounded_inverse((-system).to(tl.float16), C).to(tl.float16)
        solved = dot(b_kk, solved, zeros_c)
    tl.store(solve + square, solved.to(dtype), mask=mask_t[:, None])


@triton.jit(do_not_specialize=["num_seqs"])
def _products_kernel(
    beta: tl.tensor,
    dout: tl.tensor,
    errors: tl.tensor,
    derrors: tl.tensor,
    cu_seqlens: tl.tensor,
    d_system: tl.tensor,
    d_attend: tl.tensor,
    dbeta: tl.tensor,
    scale: tl.tensor,
    num_seqs: tl.tensor,
    stride_beta: tl.tensor,
    stride_o: tl.tensor,
    H: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Compute gradients of one chunk's products of k with k and q with k: one program.

    The grid is chunks by heads. ``d_system`` and ``d_attend`` [T, H, C] are symmetric: both rows
    that meet find what they are to each other in a row of their own.
    """
    chunk = tl.program_id(0) // H
    head = tl.program_id(0) % H
    _seq, _begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, chunk, C)
    if first_token >= end:
        return
    dtype: tl.constexpr = dout.dtype.element_ty
    row = tl.arange(0, C)
    token = (first_token + row).to(tl.int64)
    mask_t = first_token + row < end
    b_beta = tl.load(beta + token * stride_beta + head, mask=mask_t, other=0.0)
    by_attend = tl.zeros([C, C], dtype=tl.float32)
    by_system = tl.zeros([C, C], dtype=tl.float32)
    by_beta = tl.zeros([C], dtype=tl.float32)
    for base in range(0, V, BLOCK_V):
        index_v = base + tl.arange(0, BLOCK_V)
        mask = mask_t[:, None] & ((index_v < V) | (V % BLOCK_V == 0))[None, :]
        tile_v = (token * H + head)[:, None] * V + index_v[None, :]
        tile_o = token[:, None] * stride_o + head * V + index_v[None, :]
        b_do = tl.load(dout + tile_o, mask=mask, other=0.0)
        b_e = tl.load(errors + tile_v, mask=mask, other=0.0).to(tl.float32)
        b_de = tl.load(derrors + tile_v, mask=mask, other=0.0)
        by_beta += tl.sum(b_e * b_de.to(tl.float32), 1)
        t_u = tl.trans((b_e * b_beta[:, None]).to(dtype))
        by_attend = dot(b_do, t_u, by_attend)
        by_system = dot(b_de, t_u, by_system)
    square = (token * H + head)[:, None] * C + row[None, :]
    by_system *= -b_beta[:, None]
    is_past = row[:, None] >= row[None, :]
    by_system = tl.where(is_past, by_system, tl.trans(by_system))
    by_attend = tl.where(is_past, by_attend, tl.trans(by_attend))
    tl.store(d_attend + square, (by_attend * scale).to(dtype), mask=mask_t[:, None])
    tl.store(d_system + square, by_system.to(dtype), mask=mask_t[:, None])
    tl.store(dbeta + token * H + head, by_beta, mask=mask_t)


@triton.jit
def _meet(
    b_q: tl.tensor,
    b_k: tl.tensor,
    decay: tl.tensor,
    pairs_k: tl.tensor,
    pairs_q: tl.tensor,
    late: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Take gradients of products to what their rows are to them, before their own decays.

    ``b_q``, ``b_k`` and ``decay`` [B, 16, .] are those of the rows that are met; ``late`` of those
    too. ``pairs`` are [B, 16, 16].
    """
    dtype: tl.constexpr = pairs_k.dtype
    zeros = tl.zeros(b_k.shape, dtype=tl.float32)
    by_k = dot(pairs_k, (b_k.to(tl.float32) * decay).to(dtype), zeros)
    b_met = tl.where(late, b_q, b_k).to(tl.float32)
    return by_k, dot(pairs_q, (b_met * decay).to(dtype), zeros)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _inputs_kernel(
    q: tl.tensor,
    k: tl.tensor,
    totals: tl.tensor,
    beta: tl.tensor,
    dout: tl.tensor,
    states: tl.tensor,
    errors: tl.tensor,
    dstates: tl.tensor,
    derrors: tl.tensor,
    d_system: tl.tensor,
    d_attend: tl.tensor,
    cu_seqlens: tl.tensor,
    dq: tl.tensor,
    dk: tl.tensor,
    dg: tl.tensor,
    scale: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_beta: tl.tensor,
    stride_o: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STARTS: tl.constexpr,
    ENDS: tl.constexpr,
) -> None:
    """Compute the gradients of BLOCK_K channels of one chunk's q, k and g: one program.

    The grid is chunks by heads by blocks of channels. Sums [C, BLOCK_K] for q, for keys that read
    and for keys that write are in registers: first what comes from the states, then what comes from
    the rows that a row meets. A total's gradient is ``q dq + (k dk) read - (k dk) written``.
    """
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    chunk = tl.program_id(0) // (H * BLOCKS)
    head = tl.program_id(0) // BLOCKS % H
    seq, begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, chunk, C)
    if first_token >= end:
        return
    # Where sequences are given no states, those are 0.
    is_first, is_last = first_token == begin, first_token + C >= end
    has_start, has_end = STARTS | (first_token > begin), ENDS | (first_token + C < end)
    place_s = place_of_state(first_token, is_first, seq, num_tokens, C)
    place_ds = place_of_state(first_token + C, is_last, seq, num_tokens, C)
    size = tl.minimum(end - first_token, C)
    B: tl.constexpr = C // 16
    dtype: tl.constexpr = k.dtype.element_ty
    row = tl.arange(0, C)
    first = first_token.to(tl.int64)
    token = first + row
    mask_t = row < size
    index_k = tl.program_id(0) % BLOCKS * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_k = index_k < K
    b_beta = tl.load(beta + token * stride_beta + head, mask=mask_t, other=0.0)
    by_q = tl.zeros([C, BLOCK_K], dtype=tl.float32)
    by_read = tl.zeros([C, BLOCK_K], dtype=tl.float32)
    by_write = tl.zeros([C, BLOCK_K], dtype=tl.float32)
    d_whole = tl.zeros([BLOCK_K], dtype=tl.float32)
    for base in range(0, V, BLOCK_V):
        index_v = base + tl.arange(0, BLOCK_V)
        mask_v = (index_v < V) | (V % BLOCK_V == 0)
        mask_tv = mask_t[:, None] & mask_v[None, :]
        mask_s = mask_v[:, None] & mask_k[None, :]
        tile_v = (token * H + head)[:, None] * V + index_v[None, :]
        tile_o = token[:, None] * stride_o + head * V + index_v[None, :]
        tile_s = index_v[:, None] * K + index_k[None, :]
        p_s = states + (place_s.to(tl.int64) * H + head) * V * K + tile_s
        p_ds = dstates + (place_ds.to(tl.int64) * H + head) * V * K + tile_s
        b_do = tl.load(dout + tile_o, mask=mask_tv, other=0.0)
        b_e = tl.load(errors + tile_v, mask=mask_tv, other=0.0).to(tl.float32)
        b_de = tl.load(derrors + tile_v, mask=mask_tv, other=0.0).to(tl.float32)
        b_s = tl.load(p_s, mask=mask_s & has_start, other=0.0)
        b_ds = tl.load(p_ds, mask=mask_s & has_end, other=0.0)
        d_whole += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 0)
        by_q = dot(b_do, b_s, by_q)
        by_read = dot((b_de * -b_beta[:, None]).to(dtype), b_s, by_read)
        by_write = dot((b_e * b_beta[:, None]).to(dtype), b_ds, by_write)

    p_total = totals + (first * H + head) * K + index_k[None, None, :]
    p_k = k + first * stride_k + head * K + index_k[None, None, :]
    p_q = q + first * stride_q + head * K + index_k[None, None, :]
    mask_k3 = mask_k[None, None, :]
    own = tl.arange(0, B)[:, None, None] * 16 + tl.arange(0, 16)[None, :, None]
    met = tl.arange(0, B)[:, None, None] * 16 + tl.arange(0, 16)[None, None, :]
    mask = (own < size) & mask_k3
    b_k = tl.load(p_k + own * stride_k, mask=mask, other=0.0)
    b_q = tl.load(p_q + own * stride_q, mask=mask, other=0.0)
    total = tl.load(p_total + own * (H * K), mask=mask, other=0.0)
    p_last = totals + ((first + size - 1) * H + head) * K + index_k
    last = tl.load(p_last, mask=mask_k, other=0.0)
    since_start = exp(total.to(tl.float32))
    until_end = exp((last[None, None, :] - total).to(tl.float32))
    by_q = tl.reshape(by_q, [B, 16, BLOCK_K]) * (since_start * scale)
    by_read = tl.reshape(by_read, [B, 16, BLOCK_K]) * since_start
    by_write = tl.reshape(by_write, [B, 16, BLOCK_K]) * tl.where(mask, until_end, 0.0)
    written = tl.sum(tl.sum(by_write * b_k.to(tl.float32), 1), 0)

    d_system += (first * H + head) * C
    d_attend += (first * H + head) * C
    pairs = own * (H * C) + met
    near_k = tl.load(d_system + pairs, mask=own < size, other=0.0)
    near_q = tl.load(d_attend + pairs, mask=own < size, other=0.0)
    for level in tl.range(0, 4, num_stages=1):
        late = _is_late(own, 1 << level)
        decay = _to_middle(total, p_total, own, size, mask_k3, H * K, 1 << level)
        meets = (own ^ met) >> level == 1
        pairs_k, pairs_q = tl.where(meets, near_k, 0.0), tl.where(meets, near_q, 0.0)
        from_k, from_q = _meet(b_q, b_k, decay, pairs_k, pairs_q, late)
        by_q += tl.where(late, from_q * decay, 0.0)
        by_read += tl.where(late, from_k * decay, 0.0)
        by_write += tl.where(late, 0.0, (from_k + from_q) * decay)
    for other in tl.range(1, B, num_stages=1):
        late = _is_late(own, 16 << other // 2)
        partner = own ^ (16 * other)
        mask = (partner < size) & mask_k3
        k_met = tl.load(p_k + partner * stride_k, mask=mask, other=0.0)
        q_met = tl.load(p_q + partner * stride_q, mask=mask, other=0.0)
        total_met = tl.load(p_total + partner * (H * K), mask=mask, other=0.0)
        decay = _to_middle(total_met, p_total, partner, size, mask_k3, H * K, 16 << other // 2)
        late_met = _is_late(partner, 16 << other // 2)
        pairs = own * (H * C) + (met ^ (16 * other))
        pairs_k = tl.load(d_system + pairs, mask=own < size, other=0.0)
        pairs_q = tl.load(d_attend + pairs, mask=own < size, other=0.0)
        from_k, from_q = _meet(q_met, k_met, decay, pairs_k, pairs_q, late_met)
        decay = _to_middle(total, p_total, own, size, mask_k3, H * K, 16 << other // 2)
        by_q += tl.where(late, from_q * decay, 0.0)
        by_read += tl.where(late, from_k * decay, 0.0)
        by_write += tl.where(late, 0.0, (from_k + from_q) * decay)

    at_end = written + exp(last.to(tl.float32)) * d_whole
    f_q, f_k = b_q.to(tl.float32), b_k.to(tl.float32)
    d_total = tl.reshape(by_q * f_q + (by_read - by_write) * f_k, [C, BLOCK_K])
    d_total += tl.where(row == C - 1, 1.0, 0.0)[:, None] * at_end[None, :]
    # The gradient of a decay is the sum over the rows from its own on.
    d_g = tl.sum(d_total, 0)[None, :] - tl.cumsum(d_total, 0) + d_total
    # A row that meets itself does so without a decay.
    d_own = tl.load(d_attend + own * (H * C + 1), mask=own < size, other=0.0)
    by_q += d_own.to(tl.float32) * f_k
    by_k = by_read + by_write + d_own.to(tl.float32) * f_q
    place = (first * H + head) * K
    tile_k = own * (H * K) + index_k[None, None, :]
    mask = (own < size) & mask_k3
    tl.store(dq + place + tile_k, by_q.to(dtype), mask=mask)
    tl.store(dk + place + tile_k, by_k.to(dtype), mask=mask)
    tile_g = row[:, None] * (H * K) + index_k[None, :]
    tl.store(dg + place + tile_g, d_g, mask=mask_t[:, None] & mask_k[None, :])
