# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton" of the backward of linear attention with a scalar decay.

1. ``_states_kernel`` walks sequences forwards, and stores the states at the starts of chunks.
2. ``_gradients_kernel`` walks backwards, and stores the gradients of the states at their ends.
3. ``_values_kernel``, all chunks and heads at once: gradients of v, g and dt.
4. ``_keys_kernel``, all chunks and groups at once: what up to eight heads of a group add to the
   gradients of q and k. Torch sums these at last, where groups are larger, and the gradients of D.

All sums have one order, so that two runs have the same bits; none is atomic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.core.packed import empty_gradients
from torch_hybrid.ops.ssd.training.op import TrainedSsd
from torch_hybrid.ops.triton.decays import (
    cumulate,
    decay_between,
    decay_of_chunk,
    decay_since_start,
    decay_until_end,
)
from torch_hybrid.ops.triton.devices import is_hopper
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.products import dot
from torch_hybrid.ops.triton.ragged import num_blocks, place_of_state, tokens_of_block


class _Tiles(NamedTuple):
    """Tokens of a chunk, and the options of each kernel."""

    chunk: int
    walks: dict[str, int]
    values: dict[str, int]
    keys: dict[str, int]


def ssd_backward(x: TrainedSsd) -> tuple[Tensor, ...]:
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
    chunk, by_walks, by_values, by_keys = _tiles(x)
    parts = triton.cdiv(num_heads // num_groups, by_keys["HEADS"])
    options = {"C": chunk, "BLOCK_K": max(16, triton.next_power_of_2(k_dim))}
    options["enable_fp_fusion"] = True
    states, dstates = (
        x.v.new_empty(
            triton.cdiv(num_tokens, chunk) + (0 if given is None else x.num_seqs),
            *(num_heads, v_dim, k_dim),
        )
        for given in (x.initial_state, x.dfinal_state)
    )
    walks = (triton.cdiv(v_dim, by_walks["BLOCK_V"]) * num_heads * x.num_seqs,)
    by_walks |= options
    bind(_states_kernel, x)[walks](states=states, **by_walks)
    bind(_gradients_kernel, x)[walks](
        dstates=dstates, dinitial=None if x.initial_state is None else dinitial, **by_walks
    )
    own = torch.zeros_like(x.g, memory_format=torch.contiguous_format)
    summed = x.q if parts == 1 else x.g
    dq, dk = summed.new_zeros(2, parts, num_tokens, num_groups, k_dim)
    chunks = num_blocks(num_tokens, x.num_seqs, chunk)
    given = {"states": states, "dstates": dstates} | options
    given |= {"STARTS": x.initial_state is not None, "ENDS": x.dfinal_state is not None}
    bind(_values_kernel, x)[(chunks * num_heads,)](
        dv=dv, dg=dg, ddt=None if x.dt is None else ddt, own=own, **given, **by_values
    )
    bind(_keys_kernel, x)[(chunks * num_groups * parts,)](dq=dq, dk=dk, **given, **by_keys)
    dq, dk = (each[0] if parts == 1 else each.sum(0).to(x.q.dtype) for each in (dq, dk))
    return dq, dk, dv, dg, ddt, dD if x.D is None else own.sum(0), dinitial


def _tiles(x: TrainedSsd) -> _Tiles:
    """Choose what is fastest on Hopper, as measured on an H200; elsewhere, that nothing spills."""
    k_dim, v_dim = x.k.shape[2], x.v.shape[2]
    by_head = {"num_warps": 8, "num_stages": 1}
    by_group = {"HEADS": 8, "num_warps": 8, "num_stages": 2}
    if x.v.dtype == torch.float32:
        return _Tiles(
            chunk=32 if k_dim <= 128 else 16,
            walks={"BLOCK_V": 16, "num_warps": 4, "num_stages": 2},
            values=by_head | {"BLOCK_V": 32},
            keys=by_group | {"BLOCK_V": 32},
        )
    if not is_hopper(x.v.device):
        return _Tiles(
            chunk=32,
            walks={"BLOCK_V": 32, "num_warps": 4, "num_stages": 2},
            values=by_head | {"BLOCK_V": 16},
            keys=by_group | {"BLOCK_V": 32},
        )
    block_v = 64 if v_dim % 64 == 0 and k_dim <= 128 else 32
    walks = {"num_warps": 4, "num_stages": 3} if k_dim <= 128 else {"num_warps": 8, "num_stages": 2}
    return _Tiles(
        chunk=64,
        walks=walks | {"BLOCK_V": 128 if 64 < v_dim < 128 and k_dim <= 128 else 64},
        values={"BLOCK_V": block_v, "num_warps": 4, "num_stages": 1},
        keys=by_group | {"BLOCK_V": block_v},
    )


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
def _values_kernel(
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
    BLOCK_V: tl.constexpr,
    STARTS: tl.constexpr,
    ENDS: tl.constexpr,
) -> None:
    """Compute the gradients of one chunk's v, g and dt, and of D in ``own [T, H]``, of one head.

    The grid is chunks by heads. Rows of q and k stay in shared memory; [C, C] products too.
    """
    pid = tl.program_id(0)
    head = pid % H
    group = head // (H // G)
    seq, begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, pid // H, C)
    if first_token >= end:
        return
    # Where sequences are given no states, those are 0.
    is_first, is_last = first_token == begin, first_token + C >= end
    has_start, has_end = STARTS | (first_token > begin), ENDS | (first_token + C < end)
    place_s = place_of_state(first_token, is_first, seq, num_tokens, C).to(tl.int64)
    place_ds = place_of_state(first_token + C, is_last, seq, num_tokens, C).to(tl.int64)
    dtype: tl.constexpr = k.dtype.element_ty
    row = tl.arange(0, C)
    first = first_token.to(tl.int64)
    place = (first + row) * H + head
    mask_t = first_token + row < end
    index_k = tl.arange(0, BLOCK_K)
    mask_k = index_k < K
    mask_tk = mask_t[:, None] & mask_k[None, :]
    tile_q = row[:, None] * STRIDE_Q + index_k[None, :]
    tile_k = row[:, None] * STRIDE_K + index_k[None, :]
    b_q = tl.load(q + first * STRIDE_Q + group * K + tile_q, mask=mask_tk, other=0.0)
    b_k = tl.load(k + first * STRIDE_K + group * K + tile_k, mask=mask_tk, other=0.0)
    total = cumulate(tl.load(g + (first + row) * stride_g + head, mask=mask_t, other=0.0))
    step = mask_t.to(tl.float32)
    if dt is not None:
        step = tl.load(dt + (first + row) * stride_dt + head, mask=mask_t, other=0.0)
    until_end = decay_until_end(total, C)
    square = tl.zeros([C, C], dtype=tl.float32)
    attend = dot(b_q, tl.trans(b_k), square) * (decay_between(total, C) * scale)
    d_attend = tl.zeros([C, C], dtype=tl.float32)
    d_step = tl.zeros([C], dtype=tl.float32)
    read = tl.zeros([C], dtype=tl.float32)
    written = tl.zeros([C], dtype=tl.float32)
    b_own = tl.zeros([C], dtype=tl.float32)
    whole = 0.0
    for base in range(0, V, BLOCK_V):
        index_v = base + tl.arange(0, BLOCK_V)
        mask_v = index_v < V
        mask_tv = mask_t[:, None] & mask_v[None, :]
        mask_s = mask_v[:, None] & mask_k[None, :]
        tile_s = index_v[:, None] * K + index_k[None, :]
        p_v = v + first * STRIDE_V + head * V + row[:, None] * STRIDE_V + index_v[None, :]
        p_o = dout + first * STRIDE_DOUT + head * V + row[:, None] * STRIDE_DOUT + index_v[None, :]
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
        narrow = tl.zeros([C, BLOCK_V], dtype=tl.float32)
        read += tl.sum(dot(b_q, tl.trans(b_s), narrow) * f_o, 1)
        d_u = dot(b_k, tl.trans(b_ds), narrow) * until_end[:, None]
        written += tl.sum(d_u * b_u, 1)
        d_u = dot(tl.trans(attend.to(dtype)), b_o, d_u)
        d_step += tl.sum(d_u * b_v, 1)
        b_own += tl.sum(f_o * b_v, 1)
        d_v = d_u * step[:, None]
        if D is not None:
            d_v += tl.load(D + head) * f_o
        p_dv = dv + (first * H + head) * V + row[:, None] * (H * V) + index_v[None, :]
        tl.store(p_dv, d_v.to(dtype), mask=mask_tv)
    # A decay is in all that is read at its row or after it, and in all that is written before it;
    # that of row t lies between all i >= t and j < t.
    pairs = tl.where(row[:, None] > row[None, :], d_attend * attend, 0.0)
    later = read * (decay_since_start(total) * scale) + tl.sum(pairs, 1) - tl.sum(pairs, 0)
    d_g = tl.cumsum(later, 0, reverse=True) + (tl.cumsum(written, 0) - written)
    tl.store(dg + place, d_g + whole * decay_of_chunk(total, C), mask=mask_t)
    tl.store(own + place, b_own, mask=mask_t)
    if ddt is not None:
        tl.store(ddt + place, d_step, mask=mask_t)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _keys_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    dt: tl.tensor | None,
    dout: tl.tensor,
    states: tl.tensor,
    dstates: tl.tensor,
    cu_seqlens: tl.tensor,
    dq: tl.tensor,
    dk: tl.tensor,
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
    """Compute the gradients of one chunk's q and k by HEADS heads of a group: one program.

    The grid is chunks by groups by parts of a group. ``dq`` and ``dk`` [parts, T, G, K]. Sums
    [C, K] for q and k stay in registers over all heads, and those [C, C] for their products.
    """
    GROUP: tl.constexpr = H // G
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    pid = tl.program_id(0)
    part = pid % PARTS
    group = pid // PARTS % G
    seq, begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, pid // (PARTS * G), C)
    if first_token >= end:
        return
    is_first, is_last = first_token == begin, first_token + C >= end
    has_start, has_end = STARTS | (first_token > begin), ENDS | (first_token + C < end)
    place_s = place_of_state(first_token, is_first, seq, num_tokens, C).to(tl.int64)
    place_ds = place_of_state(first_token + C, is_last, seq, num_tokens, C).to(tl.int64)
    dtype: tl.constexpr = k.dtype.element_ty
    row = tl.arange(0, C)
    first = first_token.to(tl.int64)
    mask_t = first_token + row < end
    index_k = tl.arange(0, BLOCK_K)
    mask_k = index_k < K
    by_q = tl.zeros([C, BLOCK_K], dtype=tl.float32)
    by_k = tl.zeros([C, BLOCK_K], dtype=tl.float32)
    d_products = tl.zeros([C, C], dtype=tl.float32)
    for head in range(group * GROUP + part * HEADS, group * GROUP + min((part + 1) * HEADS, GROUP)):
        total = cumulate(tl.load(g + (first + row) * stride_g + head, mask=mask_t, other=0.0))
        step = mask_t.to(tl.float32)
        if dt is not None:
            step = tl.load(dt + (first + row) * stride_dt + head, mask=mask_t, other=0.0)
        since_start = decay_since_start(total)
        until_end = decay_until_end(total, C)
        d_attend = tl.zeros([C, C], dtype=tl.float32)
        for base in range(0, V, BLOCK_V):
            index_v = base + tl.arange(0, BLOCK_V)
            mask_v = index_v < V
            mask_tv = mask_t[:, None] & mask_v[None, :]
            mask_s = mask_v[:, None] & mask_k[None, :]
            tile_s = index_v[:, None] * K + index_k[None, :]
            tile_v = row[:, None] * STRIDE_V + index_v[None, :]
            tile_o = row[:, None] * STRIDE_DOUT + index_v[None, :]
            b_v = tl.load(v + first * STRIDE_V + head * V + tile_v, mask=mask_tv, other=0.0)
            b_o = tl.load(dout + first * STRIDE_DOUT + head * V + tile_o, mask=mask_tv, other=0.0)
            p_s = states + (place_s * H + head) * V * K + tile_s
            p_ds = dstates + (place_ds * H + head) * V * K + tile_s
            b_s = tl.load(p_s, mask=mask_s & has_start, other=0.0)
            b_ds = tl.load(p_ds, mask=mask_s & has_end, other=0.0)
            b_u = b_v.to(tl.float32) * step[:, None]
            d_attend = dot(b_o, tl.trans(b_u.to(dtype)), d_attend)
            by_q = dot((b_o.to(tl.float32) * since_start[:, None]).to(dtype), b_s, by_q)
            by_k = dot((b_u * until_end[:, None]).to(dtype), b_ds, by_k)
        d_products += d_attend * decay_between(total, C)
    tile = row[:, None] * STRIDE_K + index_k[None, :]
    mask_tk = mask_t[:, None] & mask_k[None, :]
    d_products = (d_products * scale).to(dtype)
    b_k = tl.load(k + first * STRIDE_K + group * K + tile, mask=mask_tk, other=0.0)
    by_q = dot(d_products, b_k, by_q * scale)
    place = ((part * num_tokens.to(tl.int64) + first) * G + group) * K
    place += row[:, None] * (G * K) + index_k[None, :]
    tl.store(dq + place, by_q.to(dq.dtype.element_ty), mask=mask_tk)
    tile = row[:, None] * STRIDE_Q + index_k[None, :]
    b_q = tl.load(q + first * STRIDE_Q + group * K + tile, mask=mask_tk, other=0.0)
    by_k = dot(tl.trans(d_products), b_q, by_k)
    tl.store(dk + place, by_k.to(dk.dtype.element_ty), mask=mask_tk)
