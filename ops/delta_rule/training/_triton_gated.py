# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton" of the gated delta rule's backward: four launches, chunks of C tokens.

Of a value head with keys k, decays D between rows and M = strictly lower (k k^T D), README.md has
what a chunk computes: ``e = r - N (beta r)``, ``r = v - since_start (k S^T)``, written as
``u = beta e``; ``N = M (I + beta M)^-1`` is all that a chunk knows of its system.

1. ``_systems_kernel``, all chunks at once: N, decayed products of q and k, decays.
2. States forwards (``_triton_walks.py``): those at the starts of chunks, which are stored, and e.
3. Backwards: gradients of the states at the ends of chunks, and of e before beta,
   ``d = du - N^T (beta du)``; of v it is ``beta d``.
4. ``_inputs_kernel``, all chunks at once: gradients of q, k, g and beta; on Hopper that of
   ``_hopper_inputs.py``. A chunk's gradient of its cumulated decays is ``q dq + (k dk) of keys
   that read - (k dk) of keys that write``.

All sums have one order, so that two runs have the same bits; none is atomic.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.delta_rule._triton_system import inverse, rounded_inverse
from torch_hybrid.ops.delta_rule.training._hopper import (
    hopper_inputs,
    hopper_walks,
    serves,
)
from torch_hybrid.ops.delta_rule.training._triton_unit_rows import unit_rows
from torch_hybrid.ops.delta_rule.training._triton_walks import (
    Rows,
    empty_walked,
    rows_of_v,
    walk_gradients,
    walk_states,
)
from torch_hybrid.ops.delta_rule.training.op import TrainedGatedDeltaRule
from torch_hybrid.ops.triton.decays import (
    cumulate,
    decay_between,
    decay_since_start,
    decay_until_end,
)
from torch_hybrid.ops.triton.devices import is_hopper
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.products import NUM_PIECES, dot
from torch_hybrid.ops.triton.ragged import num_blocks, place_of_state, tokens_of_block

_PIECES: tl.constexpr = tl.constexpr(NUM_PIECES)
_LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))


@without_autocast
def gated_delta_rule_backward(x: TrainedGatedDeltaRule) -> tuple[Tensor, ...]:
    """Compute the gradients of q, k, v, g, beta and the initial state."""
    unit = unit_rows(x)
    q, k, v, g, beta = unit.q, unit.k, x.v, x.g, x.beta
    num_tokens, num_k_heads, k_dim = k.shape
    _, num_v_heads, v_dim = v.shape
    grads = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q, k, v)]
    grads += [torch.empty_like(each, memory_format=torch.contiguous_format) for each in (g, beta)]
    dinitial = x.states(0) if x.initial_state is None else torch.empty_like(x.initial_state)
    if x.num_seqs == 0:
        return *(each.zero_() for each in grads), dinitial
    exact = k.dtype == torch.float32
    chunk = 64 if not exact and k_dim <= 128 else 32
    programs = num_blocks(num_tokens, x.num_seqs, chunk)
    solve, attend = (k.new_empty(num_tokens, num_v_heads, chunk) for _ in range(2))
    # Decays from the start of a chunk, and to its end; sums of their binary logarithms.
    factors = k.new_empty(3, num_tokens, num_v_heads, dtype=torch.float32)
    places = x.cu_seqlens.new_empty(programs, 4) if serves(x, q, k) else None
    sizes = {"C": chunk, "BLOCK_K": max(16, triton.next_power_of_2(k_dim))}
    given = {"STARTS": x.initial_state is not None, "ENDS": x.dfinal_state is not None}
    bind(_systems_kernel, x)[(programs * num_v_heads,)](
        q=q,
        k=k,
        solve=solve,
        attend=attend,
        factors=factors,
        places=places,
        scratch=k.new_empty(programs * num_v_heads, chunk, 16) if exact else None,
        **sizes,
        **given,
        num_warps=4,
        num_stages=1,
        maxnreg=168 if chunk == 64 and is_hopper(q.device) else None,
        enable_fp_fusion=True,
    )
    rows = Rows(queries=q, reads=k, writes=None, decays=factors, solve=solve, attend=attend)
    walked = empty_walked(x, chunk)
    dq, dk, _, dg, dbeta = grads
    if places is not None:
        hopper_walks(x, rows, walked, (*grads, dinitial))
        hopper_inputs(x, unit, rows, walked, places, (dq, dk, dg, dbeta))
        return *grads, dinitial
    walk_states(x, rows, walked, sizes)
    walk_gradients(x, rows, walked, (*grads, dinitial), sizes)
    bind(_inputs_kernel, x, walked)[(programs * num_k_heads,)](
        q=q,
        k=k,
        states=walked.states,
        dq=dq,
        dk=dk,
        dg=dg,
        dbeta=dbeta,
        stride_o=x.dout.stride(0),
        **sizes,
        **given,
        BLOCK_V=min(32, rows_of_v(v_dim)),
        num_warps=8,
        num_stages=2 if exact else 3,
        enable_fp_fusion=True,
    )
    unit.unnormalise(dq, dk)
    return *grads, dinitial


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _systems_kernel(
    q: tl.tensor,
    k: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    cu_seqlens: tl.tensor,
    solve: tl.tensor,
    attend: tl.tensor,
    factors: tl.tensor,
    places: tl.tensor | None,
    scratch: tl.tensor | None,
    scale: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_g: tl.tensor,
    stride_beta: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STARTS: tl.constexpr,
    ENDS: tl.constexpr,
) -> None:
    """Prepare one chunk of one value head: one program. The grid is chunks by value heads.

    ``solve`` and ``attend`` [T, HV, C]; ``factors`` [3, T, HV]. ``places`` [X, 4]: a chunk's first
    token, the tokens that are left from there, and the states before and behind it, -1 for none.
    Rows of q and k are in registers, whole.
    """
    chunk = tl.program_id(0) // HV
    head_v = tl.program_id(0) % HV
    head_k = head_v // (HV // H)
    seq, begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, chunk, C)
    if places is not None:
        is_first, is_last = first_token == begin, first_token + C >= end
        before = place_of_state(first_token, is_first, seq, num_tokens, C)
        behind = place_of_state(first_token + C, is_last, seq, num_tokens, C)
        p_place = places + 4 * chunk
        tl.store(p_place, first_token)
        tl.store(p_place + 1, end - first_token)
        tl.store(p_place + 2, tl.where(is_first & (not STARTS), -1, before).to(tl.int32))
        tl.store(p_place + 3, tl.where(is_last & (not ENDS), -1, behind).to(tl.int32))
    if first_token >= end:
        return
    # Rows past the end have beta 0 and g 0.
    row = tl.arange(0, C)
    token = (first_token + row).to(tl.int64)
    mask_t = first_token + row < end
    b_beta = tl.load(beta + token * stride_beta + head_v, mask=mask_t, other=0.0)
    b_g = tl.load(g + token * stride_g + head_v, mask=mask_t, other=0.0)
    index_k = tl.arange(0, BLOCK_K)[None, :]
    mask_tk = mask_t[:, None] & (index_k < K)
    tile_k = k + token[:, None] * stride_k + head_k * K + index_k
    tile_q = q + token[:, None] * stride_q + head_k * K + index_k
    b_k = tl.load(tile_k, mask=mask_tk, other=0.0)
    b_q = tl.load(tile_q, mask=mask_tk, other=0.0)
    zeros = tl.zeros([C, C], dtype=tl.float32)
    b_kk = dot(b_k, tl.trans(b_k), zeros)
    b_qk = dot(b_q, tl.trans(b_k), zeros)

    EXACT: tl.constexpr = k.dtype.element_ty == tl.float32
    total = cumulate(b_g, dtype=tl.float64 if EXACT else tl.float32)
    place = first_token.to(tl.int64) * HV + head_v
    p_f = factors + place + row * HV
    tl.store(p_f, decay_since_start(total), mask=mask_t)
    tl.store(p_f + num_tokens.to(tl.int64) * HV, decay_until_end(total, C), mask=mask_t)
    if places is not None:
        tl.store(p_f + num_tokens.to(tl.int64) * 2 * HV, total * _LOG2_E, mask=mask_t)
    decay = decay_between(total, C)
    square = row[:, None] * (HV * C) + row[None, :]
    b_qk = (b_qk * decay * scale).to(attend.dtype.element_ty)
    tl.store(attend + place * C + square, b_qk, mask=mask_t[:, None])
    among = tl.where(row[:, None] > row[None, :], b_kk * decay, 0.0)
    system = among * b_beta[:, None]
    if EXACT:
        p_scratch = scratch + tl.program_id(0).to(tl.int64) * 16 * C
        solved = dot(among, inverse(system, p_scratch, C, _PIECES), zeros)
    else:
        solved = rounded_inverse((-system).to(tl.float16), C).to(tl.float16)
        solved = dot(among.to(tl.float16), solved, zeros)
    tl.store(solve + place * C + square, solved.to(solve.dtype.element_ty), mask=mask_t[:, None])


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _inputs_kernel(
    q: tl.tensor,
    k: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    dout: tl.tensor,
    states: tl.tensor,
    errors: tl.tensor,
    dstates: tl.tensor,
    derrors: tl.tensor,
    cu_seqlens: tl.tensor,
    dq: tl.tensor,
    dk: tl.tensor,
    dg: tl.tensor,
    dbeta: tl.tensor,
    scale: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_g: tl.tensor,
    stride_beta: tl.tensor,
    stride_o: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STARTS: tl.constexpr,
    ENDS: tl.constexpr,
) -> None:
    """Compute the gradients of one chunk's inputs of one key head: one program.

    The grid is chunks by key heads. A program takes the value heads of its key head in turn, and of
    each BLOCK_V rows of the states; sums [C, K] for q, for keys that read and for keys that write
    stay in registers over all of them. A head's share of a sum is what it grew by.
    """
    chunk = tl.program_id(0) // H
    head_k = tl.program_id(0) % H
    seq, begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, chunk, C)
    if first_token >= end:
        return
    # Where sequences are given no states, those are 0.
    is_first, is_last = first_token == begin, first_token + C >= end
    has_start, has_end = STARTS | (first_token > begin), ENDS | (first_token + C < end)
    place_s = place_of_state(first_token, is_first, seq, num_tokens, C)
    place_ds = place_of_state(first_token + C, is_last, seq, num_tokens, C)
    dtype: tl.constexpr = k.dtype.element_ty
    GROUP: tl.constexpr = HV // H
    row = tl.arange(0, C)
    token = (first_token + row).to(tl.int64)
    mask_t = first_token + row < end
    index_k = tl.arange(0, BLOCK_K)
    mask_k = (index_k < K) | (K == BLOCK_K)
    mask_tk = mask_t[:, None] & mask_k[None, :]
    p_k = k + token[:, None] * stride_k + head_k * K + index_k[None, :]
    p_q = q + token[:, None] * stride_q + head_k * K + index_k[None, :]
    by_q = tl.zeros([C, BLOCK_K], dtype=tl.float32)
    by_read = tl.zeros([C, BLOCK_K], dtype=tl.float32)
    by_write = tl.zeros([C, BLOCK_K], dtype=tl.float32)
    before = tl.zeros([C], dtype=tl.float32)
    write_before = tl.zeros([C], dtype=tl.float32)
    for head in range(GROUP):
        head_v = head_k * GROUP + head
        b_beta = tl.load(beta + token * stride_beta + head_v, mask=mask_t, other=0.0)
        b_g = tl.load(g + token * stride_g + head_v, mask=mask_t, other=0.0)
        total = cumulate(b_g, dtype=tl.float64 if dtype == tl.float32 else tl.float32)
        since_start = decay_since_start(total)
        until_end = decay_until_end(total, C)
        whole = tl.sum(tl.where(row == C - 1, since_start, 0.0), 0)
        d_attend = tl.zeros([C, C], dtype=tl.float32)
        d_system = tl.zeros([C, C], dtype=tl.float32)
        d_beta = tl.zeros([C], dtype=tl.float32)
        d_whole = tl.zeros([BLOCK_V], dtype=tl.float32)
        for base in range(0, V, BLOCK_V):
            index_v = base + tl.arange(0, BLOCK_V)
            mask_v = (index_v < V) | (V % BLOCK_V == 0)
            mask_tv = mask_t[:, None] & mask_v[None, :]
            mask_s = mask_v[:, None] & mask_k[None, :]
            tile_v = (token * HV + head_v)[:, None] * V + index_v[None, :]
            tile_o = token[:, None] * stride_o + head_v * V + index_v[None, :]
            tile_s = index_v[:, None] * K + index_k[None, :]
            p_s = states + (place_s.to(tl.int64) * HV + head_v) * V * K
            p_ds = dstates + (place_ds.to(tl.int64) * HV + head_v) * V * K
            b_do = tl.load(dout + tile_o, mask=mask_tv, other=0.0)
            b_e = tl.load(errors + tile_v, mask=mask_tv, other=0.0).to(tl.float32)
            b_de = tl.load(derrors + tile_v, mask=mask_tv, other=0.0)
            b_s = tl.load(p_s + tile_s, mask=mask_s & has_start, other=0.0)
            b_ds = tl.load(p_ds + tile_s, mask=mask_s & has_end, other=0.0)
            d_whole += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 1)
            f_de = b_de.to(tl.float32)
            d_beta += tl.sum(b_e * f_de, 1)
            b_u = b_e * b_beta[:, None]
            t_u = tl.trans(b_u.to(dtype))
            d_attend = dot(b_do, t_u, d_attend)
            d_system = dot(b_de, t_u, d_system)
            f_do = b_do.to(tl.float32) * (since_start * scale)[:, None]
            by_q = dot(f_do.to(dtype), b_s, by_q)
            by_read = dot((f_de * (-b_beta * since_start)[:, None]).to(dtype), b_s, by_read)
            by_write = dot((b_u * until_end[:, None]).to(dtype), b_ds, by_write)
        b_k = tl.load(p_k, mask=mask_tk, other=0.0)
        b_q = tl.load(p_q, mask=mask_tk, other=0.0)
        f_k = b_k.to(tl.float32)
        written = tl.sum(tl.sum(by_write * f_k, 1) - write_before, 0)
        decay = decay_between(total, C)
        is_past = row[:, None] > row[None, :]
        d_attend = (d_attend * decay * scale).to(dtype)
        d_system = tl.where(is_past, d_system * decay * -b_beta[:, None], 0.0).to(dtype)
        by_q = dot(d_attend, b_k, by_q)
        by_read = dot(d_system, b_k, by_read)
        by_write = dot(tl.trans(d_attend), b_q, by_write)
        by_write = dot(tl.trans(d_system), b_k, by_write)
        write = tl.sum(by_write * f_k, 1)
        after = tl.sum(by_q * b_q.to(tl.float32), 1) + tl.sum(by_read * f_k, 1) - write
        at_end = written + whole * tl.sum(d_whole, 0)
        d_total = after - before + tl.where(row == C - 1, at_end, 0.0)
        before = after
        write_before = write
        # The gradient of a decay is the sum over the rows from its own on.
        d_g = tl.sum(d_total, 0) - tl.cumsum(d_total, 0) + d_total
        tl.store(dg + token * HV + head_v, d_g, mask=mask_t)
        tl.store(dbeta + token * HV + head_v, d_beta, mask=mask_t)
    tile_k = (token * H + head_k)[:, None] * K + index_k[None, :]
    tl.store(dq + tile_k, by_q.to(dtype), mask=mask_tk)
    tl.store(dk + tile_k, (by_read + by_write).to(dtype), mask=mask_tk)
