# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton" of the backward of linear attention with a scalar decay.

1. ``_states_kernel`` walks sequences forwards, and stores the states at the starts of chunks.
2. ``_gradients_kernel`` walks backwards, and stores the gradients of the states at their ends.
3. ``_inputs_kernel``, all chunks at once: gradients of v, g and dt, and what a few heads of a group
   add to those of q and k. Torch sums these at last, and the gradients of D.

All sums have one order, so that two runs have the same bits; none is atomic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.ssd.training.op import SsdBackward, empty_gradients
from torch_hybrid.ops.triton.decays import (
    cumulate,
    decay_between,
    decay_of_chunk,
    decay_since_start,
    decay_until_end,
)
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.products import dot
from torch_hybrid.ops.triton.ragged import num_blocks, place_of_state, tokens_of_block

_HEADS = 4  # of a group that a program takes in turn


def ssd_backward(x: SsdBackward) -> tuple[Tensor, ...]:
    """Compute the gradients of q, k, v, g, dt, D and the initial state."""
    num_tokens, num_groups, k_dim = x.k.shape
    _, num_heads, v_dim = x.v.shape
    grads = empty_gradients(x)
    if x.num_seqs == 0 or num_tokens == 0:
        *_, dinitial = grads = tuple(each.zero_() for each in grads)
        if x.dfinal_state is not None and x.initial_state is not None:
            dinitial.copy_(x.dfinal_state)
        return grads
    _, _, dv, dg, ddt, dD, dinitial = grads
    for each in (dv, dg, ddt):
        each.zero_()  # rows of padding
    chunk = 32 if k_dim <= 128 else 16  # sums [C, K] of q and k stay in registers
    parts = triton.cdiv(num_heads // num_groups, _HEADS)
    options = {"C": chunk, "BLOCK_K": max(16, triton.next_power_of_2(k_dim))}
    options["enable_fp_fusion"] = True
    states, dstates = (
        x.v.new_empty(
            triton.cdiv(num_tokens, chunk) + (0 if given is None else x.num_seqs),
            *(num_heads, v_dim, k_dim),
        )
        for given in (x.initial_state, x.dfinal_state)
    )
    block_v = _rows_of_v(v_dim, 16 if x.v.dtype == torch.float32 else 32)
    walks = (triton.cdiv(v_dim, block_v) * num_heads * x.num_seqs,)
    by_walk = options | {"BLOCK_V": block_v, "num_warps": 4, "num_stages": 2}
    bind(_states_kernel, x)[walks](states=states, **by_walk)
    bind(_gradients_kernel, x)[walks](
        dstates=dstates, dinitial=None if x.initial_state is None else dinitial, **by_walk
    )
    dq, dk = x.g.new_zeros(2, parts, num_tokens, num_groups, k_dim)
    own = torch.zeros_like(x.g, memory_format=torch.contiguous_format)
    bind(_inputs_kernel, x)[(num_blocks(num_tokens, x.num_seqs, chunk) * num_groups * parts,)](
        states=states,
        dstates=dstates,
        dq=dq,
        dk=dk,
        dv=dv,
        dg=dg,
        ddt=None if x.dt is None else ddt,
        own=own,
        HEADS=_HEADS,
        BLOCK_V=_rows_of_v(v_dim, 16),
        STARTS=x.initial_state is not None,
        ENDS=x.dfinal_state is not None,
        num_warps=8,
        num_stages=1,
        **options,
    )
    dq, dk = (each.sum(0).to(x.q.dtype) for each in (dq, dk))
    return dq, dk, dv, dg, ddt, dD if x.D is None else own.sum(0), dinitial


def _rows_of_v(v_dim: int, most: int) -> int:
    """Choose the rows of V of a state that a program takes at once."""
    rows: int = max(16, min(most, triton.next_power_of_2(v_dim)))
    return rows


@triton.jit(do_not_specialize=["num_tokens"])
def _states_kernel(
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    dt: tl.tensor | None,
    initial_state: tl.tensor | None,
    cu_seqlens: tl.tensor,
    states: tl.tensor,
    num_tokens: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    stride_g: tl.tensor,
    stride_dt: tl.tensor,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Walk a sequence's chunks with BLOCK_V rows of a head's state in registers: one program.

    The grid is sequences by heads by rows of V.
    """
    NUM_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    seq = pid // (NUM_BLOCKS * H)
    head = pid // NUM_BLOCKS % H
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    row = tl.arange(0, C)
    index_k = tl.arange(0, BLOCK_K)
    index_v = pid % NUM_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = index_k < K
    mask_v = index_v < V
    mask_s = mask_v[:, None] & mask_k[None, :]
    tile_s = index_v[:, None] * K + index_k[None, :]
    b_s = tl.zeros([BLOCK_V, BLOCK_K], dtype=tl.float32)
    if initial_state is not None:
        b_s += tl.load(initial_state + (seq.to(tl.int64) * H + head) * V * K + tile_s, mask=mask_s)
    for done in tl.range(0, end - begin, C):
        token = (begin + done + row).to(tl.int64)
        mask_t = done + row < end - begin
        place = place_of_state(begin + done, done == 0, seq, num_tokens, C)
        is_kept = mask_s if initial_state is not None else mask_s & (done > 0)
        p_s = states + (place.to(tl.int64) * H + head) * V * K + tile_s
        tl.store(p_s, b_s.to(states.dtype.element_ty), mask=is_kept)
        p_k = k + token[:, None] * stride_k + head // (H // G) * K + index_k[None, :]
        b_k = tl.load(p_k, mask=mask_t[:, None] & mask_k[None, :], other=0.0)
        p_v = v + token[None, :] * stride_v + head * V + index_v[:, None]
        b_v = tl.load(p_v, mask=mask_t[None, :] & mask_v[:, None], other=0.0)
        total = cumulate(tl.load(g + token * stride_g + head, mask=mask_t, other=0.0))
        weight = decay_until_end(total, C)
        if dt is not None:
            weight *= tl.load(dt + token * stride_dt + head, mask=mask_t, other=0.0)
        b_u = (b_v.to(tl.float32) * weight[None, :]).to(b_k.dtype)
        b_s = dot(b_u, b_k, b_s * decay_of_chunk(total, C))


@triton.jit(do_not_specialize=["num_tokens"])
def _gradients_kernel(
    q: tl.tensor,
    g: tl.tensor,
    dout: tl.tensor,
    dfinal_state: tl.tensor | None,
    cu_seqlens: tl.tensor,
    dstates: tl.tensor,
    dinitial: tl.tensor | None,
    scale: tl.tensor,
    num_tokens: tl.tensor,
    stride_q: tl.tensor,
    stride_g: tl.tensor,
    stride_dout: tl.tensor,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Walk a sequence's chunks backwards with BLOCK_V rows of a state's gradient: one program.

    The grid is that of the states.
    """
    NUM_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    seq = pid // (NUM_BLOCKS * H)
    head = pid // NUM_BLOCKS % H
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    row = tl.arange(0, C)
    index_k = tl.arange(0, BLOCK_K)
    index_v = pid % NUM_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = index_k < K
    mask_v = index_v < V
    mask_s = mask_v[:, None] & mask_k[None, :]
    tile_s = index_v[:, None] * K + index_k[None, :]
    p_state = (seq.to(tl.int64) * H + head) * V * K + tile_s
    b_s = tl.zeros([BLOCK_V, BLOCK_K], dtype=tl.float32)
    if dfinal_state is not None:
        b_s += tl.load(dfinal_state + p_state, mask=mask_s)
    num_chunks = (end - begin + C - 1) // C
    for turn in tl.range(0, num_chunks):
        done = (num_chunks - 1 - turn) * C
        token = (begin + done + row).to(tl.int64)
        mask_t = done + row < end - begin
        place = place_of_state(begin + done + C, turn == 0, seq, num_tokens, C)
        is_kept = mask_s if dfinal_state is not None else mask_s & (turn > 0)
        p_s = dstates + (place.to(tl.int64) * H + head) * V * K + tile_s
        tl.store(p_s, b_s.to(dstates.dtype.element_ty), mask=is_kept)
        p_q = q + token[:, None] * stride_q + head // (H // G) * K + index_k[None, :]
        b_q = tl.load(p_q, mask=mask_t[:, None] & mask_k[None, :], other=0.0)
        p_o = dout + token[None, :] * stride_dout + head * V + index_v[:, None]
        b_o = tl.load(p_o, mask=mask_t[None, :] & mask_v[:, None], other=0.0)
        total = cumulate(tl.load(g + token * stride_g + head, mask=mask_t, other=0.0))
        b_o = (b_o.to(tl.float32) * (decay_since_start(total) * scale)[None, :]).to(b_q.dtype)
        b_s = dot(b_o, b_q, b_s * decay_of_chunk(total, C))
    if dinitial is not None:
        tl.store(dinitial + p_state, b_s, mask=mask_s)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _inputs_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    dt: tl.tensor | None,
    D: tl.tensor | None,
    dout: tl.tensor,
    states: tl.tensor,
    dstates: tl.tensor,
    cu_seqlens: tl.tensor,
    dq: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    dg: tl.tensor,
    ddt: tl.tensor | None,
    own: tl.tensor,
    scale: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_g: tl.tensor,
    stride_dt: tl.tensor,
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    STRIDE_DOUT: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STARTS: tl.constexpr,
    ENDS: tl.constexpr,
) -> None:
    """Compute the gradients of one chunk's inputs by HEADS heads of a group: one program.

    The grid is chunks by groups by parts of a group. ``dq`` and ``dk`` [parts, T, G, K]. Sums
    [C, K] for q and k stay in registers over all heads; rows of q, k and v are read for each.
    """
    GROUP: tl.constexpr = H // G
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    pid = tl.program_id(0)
    part = pid % PARTS
    group = pid // PARTS % G
    seq, begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, pid // (PARTS * G), C)
    if first_token >= end:
        return
    # Where sequences are given no states, those are 0.
    is_first, is_last = first_token == begin, first_token + C >= end
    has_start, has_end = STARTS | (first_token > begin), ENDS | (first_token + C < end)
    place_s = place_of_state(first_token, is_first, seq, num_tokens, C).to(tl.int64)
    place_ds = place_of_state(first_token + C, is_last, seq, num_tokens, C).to(tl.int64)
    dtype: tl.constexpr = k.dtype.element_ty
    row = tl.arange(0, C)
    token = (first_token + row).to(tl.int64)
    mask_t = first_token + row < end
    index_k = tl.arange(0, BLOCK_K)
    mask_k = index_k < K
    mask_tk = mask_t[:, None] & mask_k[None, :]
    # From one place each, at distances that are constants: fewer registers.
    first = first_token.to(tl.int64)
    p_q = q + first * STRIDE_Q + group * K
    p_k = k + first * STRIDE_K + group * K
    tile_q = row[:, None] * STRIDE_Q + index_k[None, :]
    tile_k = row[:, None] * STRIDE_K + index_k[None, :]
    by_q = tl.zeros([C, BLOCK_K], dtype=tl.float32)
    by_k = tl.zeros([C, BLOCK_K], dtype=tl.float32)
    square = tl.zeros([C, C], dtype=tl.float32)
    q_before = tl.zeros([C], dtype=tl.float32)
    k_before = tl.zeros([C], dtype=tl.float32)
    for head in range(group * GROUP + part * HEADS, group * GROUP + min((part + 1) * HEADS, GROUP)):
        total = cumulate(tl.load(g + token * stride_g + head, mask=mask_t, other=0.0))
        since_start, until_end = decay_since_start(total), decay_until_end(total, C)
        decay = decay_between(total, C) * scale
        step = mask_t.to(tl.float32)
        if dt is not None:
            step = tl.load(dt + token * stride_dt + head, mask=mask_t, other=0.0)
        b_q = tl.load(p_q + tile_q, mask=mask_tk, other=0.0)
        b_k = tl.load(p_k + tile_k, mask=mask_tk, other=0.0)
        attend = dot(b_q, tl.trans(b_k), square) * decay
        d_attend = tl.zeros([C, C], dtype=tl.float32)
        d_step = tl.zeros([C], dtype=tl.float32)
        b_own = tl.zeros([C], dtype=tl.float32)
        whole = 0.0
        for base in range(0, V, BLOCK_V):
            index_v = base + tl.arange(0, BLOCK_V)
            mask_v = index_v < V
            mask_tv = mask_t[:, None] & mask_v[None, :]
            mask_s = mask_v[:, None] & mask_k[None, :]
            tile_s = index_v[:, None] * K + index_k[None, :]
            tile_v = row[:, None] * STRIDE_V + index_v[None, :]
            tile_o = row[:, None] * STRIDE_DOUT + index_v[None, :]
            p_v = v + first * STRIDE_V + head * V + tile_v
            p_o = dout + first * STRIDE_DOUT + head * V + tile_o
            b_v = tl.load(p_v, mask=mask_tv, other=0.0).to(tl.float32)
            b_o = tl.load(p_o, mask=mask_tv, other=0.0)
            p_s = states + (place_s * H + head) * V * K + tile_s
            p_ds = dstates + (place_ds * H + head) * V * K + tile_s
            b_s = tl.load(p_s, mask=mask_s & has_start, other=0.0)
            b_ds = tl.load(p_ds, mask=mask_s & has_end, other=0.0)
            whole += tl.sum(tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 1), 0)
            f_o = b_o.to(tl.float32)
            b_u = b_v * step[:, None]
            d_attend = dot(b_o, tl.trans(b_u.to(dtype)), d_attend)
            by_q = dot((f_o * (since_start * scale)[:, None]).to(dtype), b_s, by_q)
            by_k = dot((b_u * until_end[:, None]).to(dtype), b_ds, by_k)
            narrow = tl.zeros([C, BLOCK_V], dtype=tl.float32)
            d_u = dot(b_k, tl.trans(b_ds), narrow) * until_end[:, None]
            d_u = dot(tl.trans(attend.to(dtype)), b_o, d_u)
            d_step += tl.sum(d_u * b_v, 1)
            b_own += tl.sum(f_o * b_v, 1)
            d_v = d_u * step[:, None]
            if D is not None:
                d_v += tl.load(D + head) * f_o
            p_dv = dv + (first * H + head) * V + row[:, None] * (H * V) + index_v[None, :]
            tl.store(p_dv, d_v.to(dtype), mask=mask_tv)
        # A decay is in all that is read at its row or after it, and in all that is written before
        # it; that of row t lies between all i >= t and j < t. A head's share of a sum is what it
        # grew by.
        read = tl.sum(by_q * b_q.to(tl.float32), 1) - q_before
        written = tl.sum(by_k * b_k.to(tl.float32), 1) - k_before
        pairs = tl.where(row[:, None] > row[None, :], d_attend * attend, 0.0)
        later = tl.cumsum(read + tl.sum(pairs, 1) - tl.sum(pairs, 0), 0, reverse=True)
        d_g = later + (tl.cumsum(written, 0) - written) + whole * decay_of_chunk(total, C)
        d_products = (d_attend * decay).to(dtype)
        by_q = dot(d_products, b_k, by_q)
        by_k = dot(tl.trans(d_products), b_q, by_k)
        q_before = tl.sum(by_q * b_q.to(tl.float32), 1)
        k_before = tl.sum(by_k * b_k.to(tl.float32), 1)
        place = token * H + head
        tl.store(dg + place, d_g, mask=mask_t)
        tl.store(own + place, b_own, mask=mask_t)
        if ddt is not None:
            tl.store(ddt + place, d_step, mask=mask_t)
    place_k = ((part * num_tokens.to(tl.int64) + first) * G + group) * K
    tile = row[:, None] * (G * K) + index_k[None, :]
    tl.store(dq + place_k + tile, by_q, mask=mask_tk)
    tl.store(dk + place_k + tile, by_k, mask=mask_tk)
