# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton" of the gated delta rule's backward: four launches, chunks of C tokens.

Of a value head with keys k, decays D between rows and M = strictly lower (k k^T D), README.md has
what a chunk computes: ``e = r - N (beta r)``, ``r = v - since_start (k S^T)``, written as
``u = beta e``; ``N = M (I + beta M)^-1`` is all that a chunk knows of its system.

1. ``_systems_kernel``, all chunks at once: N, decayed products of q and k, decays.
2. ``_states_kernel``, forwards: states at the starts of chunks, which are stored, and e.
3. ``_gradients_kernel``, backwards: gradients of the states at the ends of chunks, and of e before
   beta, ``d = du - N^T (beta du)``.
4. ``_inputs_kernel``, all chunks at once: gradients of q, k, v, g and beta. A chunk's gradient of
   its cumulated decays is ``q dq + (k dk) of keys that read - (k dk) of keys that write``.

All sums have one order, so that two runs have the same bits; none is atomic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.delta_rule._triton_system import inverse, rounded_inverse
from torch_hybrid.ops.delta_rule.training.op import GatedDeltaRuleBackward
from torch_hybrid.ops.delta_rule.unit_rows import gradient_before, inverse_length
from torch_hybrid.ops.triton.decays import (
    cumulate,
    decay_between,
    decay_since_start,
    decay_until_end,
)
from torch_hybrid.ops.triton.devices import PROCESSORS, is_hopper
from torch_hybrid.ops.triton.products import NUM_PIECES, dot
from torch_hybrid.ops.triton.ragged import num_blocks, tokens_of_block
from torch_hybrid.ops.triton.state import zero_rows

_PIECES: tl.constexpr = tl.constexpr(NUM_PIECES)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    """Rows of V of a state that a program walks with, by so many warps, fetched so far ahead."""

    block_v: int
    num_stages: int
    num_warps: int = 4


@without_autocast
def gated_delta_rule_backward(x: GatedDeltaRuleBackward) -> tuple[Tensor, ...]:
    """Compute the gradients of q, k, v, g, beta and the initial state."""
    if not x.qk_l2norm:
        return _launch(x, x.q, x.k)
    (q, of_q), (k, of_k) = _normalise(x.q), _normalise(x.k)
    dq, dk, *others = _launch(x, q, k)
    return _unnormalise(dq, q, of_q), _unnormalise(dk, k, of_k), *others


def _normalise(rows: Tensor) -> tuple[Tensor, Tensor]:
    wide = rows.float()
    factor = inverse_length(wide)
    return (wide * factor).to(rows.dtype), factor


def _unnormalise(grad: Tensor, rows: Tensor, factor: Tensor) -> Tensor:
    """Take a gradient of normalised rows to one of the rows before."""
    return gradient_before(grad.float(), rows.float(), factor).to(grad.dtype)


def _launch(x: GatedDeltaRuleBackward, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    v, g, beta, dout = x.v, x.g, x.beta, x.dout
    num_tokens, num_k_heads, k_dim = k.shape
    _, num_v_heads, v_dim = v.shape
    grads = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q, k, v)]
    grads += [torch.empty_like(each, memory_format=torch.contiguous_format) for each in (g, beta)]
    dinitial = x.states(0) if x.initial_state is None else torch.empty_like(x.initial_state)
    if x.num_seqs == 0:
        return *(each.zero_() for each in grads), dinitial
    chunk = 64 if k.dtype != torch.float32 and k_dim <= 128 else 32
    shape = (num_blocks(num_tokens, x.num_seqs, chunk), num_v_heads)
    solve, attend = (k.new_empty(*shape, chunk, chunk) for _ in range(2))
    factors = k.new_empty(*shape, 2, chunk, dtype=torch.float32)
    states, dstates = (k.new_empty(*shape, v_dim, k_dim) for _ in range(2))
    errors, derrors = (torch.empty_like(grads[2]) for _ in range(2))
    sizes = {"H": num_k_heads, "HV": num_v_heads, "K": k_dim, "V": v_dim, "C": chunk}
    sizes["BLOCK_K"] = max(16, triton.next_power_of_2(k_dim))
    exact = k.dtype == torch.float32
    _systems_kernel[(shape[0] * num_v_heads,)](
        q,
        k,
        g,
        beta,
        x.cu_seqlens,
        solve,
        attend,
        factors,
        k.new_empty(*shape, chunk, 16) if exact else None,
        x.scale,
        x.num_seqs,
        q.stride(0),
        k.stride(0),
        g.stride(0),
        beta.stride(0),
        **sizes,
        num_warps=4,
        num_stages=1,
        maxnreg=168 if chunk == 64 and is_hopper(q.device) else None,
        enable_fp_fusion=True,
    )
    walk, back = _walks(v, num_v_heads * x.num_seqs)
    _states_kernel[(triton.cdiv(v_dim, walk.block_v) * num_v_heads * x.num_seqs,)](
        k,
        v,
        beta,
        solve,
        factors,
        x.initial_state,
        x.cu_seqlens,
        states,
        errors,
        x.num_seqs,
        beta.stride(0),
        STRIDE_K=k.stride(0),
        STRIDE_V=v.stride(0),
        **sizes,
        BLOCK_V=walk.block_v,
        STAGES=walk.num_stages,
        num_warps=walk.num_warps,
        enable_fp_fusion=True,
    )
    _gradients_kernel[(triton.cdiv(v_dim, back.block_v) * num_v_heads * x.num_seqs,)](
        q,
        k,
        beta,
        dout,
        solve,
        attend,
        factors,
        x.dfinal_state,
        x.cu_seqlens,
        dstates,
        derrors,
        dinitial if x.initial_state is not None else None,
        *grads,
        x.scale,
        num_tokens,
        x.num_seqs,
        beta.stride(0),
        STRIDE_Q=q.stride(0),
        STRIDE_K=k.stride(0),
        STRIDE_O=dout.stride(0),
        **sizes,
        BLOCK_V=back.block_v,
        STAGES=back.num_stages,
        num_warps=back.num_warps,
        enable_fp_fusion=True,
    )
    _inputs_kernel[(shape[0] * num_k_heads,)](
        q,
        k,
        g,
        beta,
        dout,
        states,
        errors,
        dstates,
        derrors,
        x.cu_seqlens,
        *grads,
        x.scale,
        x.num_seqs,
        q.stride(0),
        k.stride(0),
        g.stride(0),
        beta.stride(0),
        dout.stride(0),
        **sizes,
        BLOCK_V=min(32, _rows_of_v(v_dim)),
        num_warps=8,
        num_stages=2 if exact else 3,
        enable_fp_fusion=True,
    )
    return *grads, dinitial


def _rows_of_v(v_dim: int) -> int:
    rows: int = triton.next_power_of_2(v_dim)
    return max(16, rows)


def _walks(v: Tensor, num_states: int) -> tuple[_Walk, _Walk]:
    """Choose how both walks cut states: narrow ones where few states would leave a GPU idle.

    On an H200, 32 heads of 128, one sequence of 8192 tokens takes 274 and 319 us, eight of 1024 135
    and 142; those 226 backwards by 64 rows and four warps.
    """
    most = _rows_of_v(v.shape[-1])
    if v.dtype == torch.float32:
        narrow = _Walk(block_v=16, num_stages=2)
        return narrow, narrow
    if num_states < PROCESSORS or not is_hopper(v.device):
        return _Walk(block_v=min(32, most), num_stages=3), _Walk(block_v=16, num_stages=3)
    wide = _Walk(block_v=min(128, most), num_stages=3, num_warps=8)
    return _Walk(block_v=min(64, most), num_stages=2), wide


@triton.jit(do_not_specialize=["num_seqs"])
def _systems_kernel(
    q: tl.tensor,
    k: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    cu_seqlens: tl.tensor,
    solve: tl.tensor,
    attend: tl.tensor,
    factors: tl.tensor,
    scratch: tl.tensor | None,
    scale: tl.tensor,
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
) -> None:
    """Prepare one chunk of one value head: one program. The grid is chunks by value heads.

    ``solve`` and ``attend`` [X, HV, C, C]; ``factors`` [X, HV, 2, C], decays since the start of the
    chunk and until its end. Rows of q and k are in registers, whole.
    """
    chunk = tl.program_id(0) // HV
    head_v = tl.program_id(0) % HV
    head_k = head_v // (HV // H)
    _seq, _begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, chunk, C)
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
    place = tl.program_id(0).to(tl.int64)
    p_f = factors + place * 2 * C + row
    tl.store(p_f, decay_since_start(total))
    tl.store(p_f + C, decay_until_end(total, C))
    decay = decay_between(total, C)
    square = place * C * C + row[:, None] * C + row[None, :]
    tl.store(attend + square, (b_qk * decay * scale).to(attend.dtype.element_ty))
    among = tl.where(row[:, None] > row[None, :], b_kk * decay, 0.0)
    system = among * b_beta[:, None]
    if EXACT:
        solved = dot(among, inverse(system, scratch + place * 16 * C, C, _PIECES), zeros)
    else:
        solved = rounded_inverse((-system).to(tl.float16), C).to(tl.float16)
        solved = dot(among.to(tl.float16), solved, zeros)
    tl.store(solve + square, solved.to(solve.dtype.element_ty))


@triton.jit(do_not_specialize=["num_seqs"])
def _states_kernel(
    k: tl.tensor,
    v: tl.tensor,
    beta: tl.tensor,
    solve: tl.tensor,
    factors: tl.tensor,
    initial: tl.tensor | None,
    cu_seqlens: tl.tensor,
    states: tl.tensor,
    errors: tl.tensor,
    num_seqs: tl.tensor,
    stride_beta: tl.tensor,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Walk a sequence's chunks with BLOCK_V rows of a head's state in registers: one program.

    The grid is sequences by value heads by rows of V. It fills in ``states`` [X, HV, V, K], before
    each chunk, and ``errors`` [T, HV, V]. Tiles have rows of V, so that numbers pass from product
    to product in registers.
    """
    NUM_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    dtype: tl.constexpr = k.dtype.element_ty
    pid = tl.program_id(0)
    seq = pid // (NUM_BLOCKS * HV)
    head_v = pid // NUM_BLOCKS % HV
    head_k = head_v // (HV // H)
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    row = tl.arange(0, C)
    index_k = tl.arange(0, BLOCK_K)
    index_v = pid % NUM_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = (index_k < K) | (K == BLOCK_K)
    mask_v = (index_v < V) | (V % BLOCK_V == 0)
    mask_s = mask_v[:, None] & mask_k[None, :]
    tile_s = index_v[:, None] * K + index_k[None, :]
    square = row[:, None] * C + row[None, :]
    b_s = tl.zeros([BLOCK_V, BLOCK_K], dtype=tl.float32)
    if initial is not None:
        p_initial = initial + (seq.to(tl.int64) * HV + head_v) * V * K
        b_s += tl.load(p_initial + tile_s, mask=mask_s, other=0.0)
    zeros = tl.zeros([BLOCK_V, C], dtype=tl.float32)
    place = (begin // C + seq).to(tl.int64) * HV + head_v
    for done in tl.range(0, end - begin, C, num_stages=STAGES):
        token = (begin + done).to(tl.int64)
        mask_t = done + row < end - begin
        p_f = factors + place * 2 * C
        since_start = tl.load(p_f + row)
        until_end = tl.load(p_f + C + row)
        whole = tl.load(p_f + C - 1)
        b_beta = tl.load(beta + (token + row) * stride_beta + head_v, mask=mask_t, other=0.0)
        tile_k = row[:, None] * STRIDE_K + index_k[None, :]
        tile_v = row[:, None] * STRIDE_V + index_v[None, :]
        mask_tk = mask_t[:, None] & mask_k[None, :]
        mask_tv = mask_t[:, None] & mask_v[None, :]
        b_k = tl.load(k + token * STRIDE_K + head_k * K + tile_k, mask=mask_tk, other=0.0)
        b_v = tl.load(v + token * STRIDE_V + head_v * V + tile_v, mask=mask_tv, other=0.0)
        b_n = tl.load(solve + place * C * C + square)
        b_state = b_s.to(dtype)
        tl.store(states + place * V * K + tile_s, b_state, mask=mask_s)
        b_r = tl.trans(b_v).to(tl.float32)
        b_r -= dot(b_state, tl.trans(b_k), zeros) * since_start[None, :]
        b_e = b_r - dot((b_r * b_beta[None, :]).to(dtype), tl.trans(b_n), zeros)
        p_e = errors + (token * HV + head_v) * V + row[None, :] * HV * V + index_v[:, None]
        tl.store(p_e, b_e.to(dtype), mask=mask_v[:, None] & mask_t[None, :])
        b_s = dot((b_e * (b_beta * until_end)[None, :]).to(dtype), b_k, b_s * whole)
        place += HV


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _gradients_kernel(
    q: tl.tensor,
    k: tl.tensor,
    beta: tl.tensor,
    dout: tl.tensor,
    solve: tl.tensor,
    attend: tl.tensor,
    factors: tl.tensor,
    dfinal: tl.tensor | None,
    cu_seqlens: tl.tensor,
    dstates: tl.tensor,
    derrors: tl.tensor,
    dinitial: tl.tensor | None,
    dq: tl.tensor,
    dk: tl.tensor,
    dv: tl.tensor,
    dg: tl.tensor,
    dbeta: tl.tensor,
    scale: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_beta: tl.tensor,
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_O: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Walk a sequence's chunks backwards with BLOCK_V rows of a state's gradient: one program.

    The grid and the tiles are those of the states. It fills in ``dstates`` [X, HV, V, K], after
    each chunk, and ``derrors`` [T, HV, V]; and gradients of padding tokens, which are 0.
    """
    NUM_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    dtype: tl.constexpr = k.dtype.element_ty
    pid = tl.program_id(0)
    seq = pid // (NUM_BLOCKS * HV)
    head_v = pid // NUM_BLOCKS % HV
    head_k = head_v // (HV // H)
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    row = tl.arange(0, C)
    index_k = tl.arange(0, BLOCK_K)
    index_v = pid % NUM_BLOCKS * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = (index_k < K) | (K == BLOCK_K)
    mask_v = (index_v < V) | (V % BLOCK_V == 0)
    mask_s = mask_v[:, None] & mask_k[None, :]
    tile_s = index_v[:, None] * K + index_k[None, :]
    square = row[:, None] * C + row[None, :]

    # The rows past the last sequence are dealt out to the sequences in turn.
    padding = tl.load(cu_seqlens + num_seqs) + seq
    zero_rows(dv, padding, num_tokens, num_seqs, head_v, index_v, mask_v, HV, V)
    if pid % NUM_BLOCKS == 0:
        zero_rows(dg, padding, num_tokens, num_seqs, head_v, row, row < 1, HV, 1)
        zero_rows(dbeta, padding, num_tokens, num_seqs, head_v, row, row < 1, HV, 1)
        zero_rows(dq, padding, num_tokens, num_seqs, head_k, index_k, mask_k, H, K)
        zero_rows(dk, padding, num_tokens, num_seqs, head_k, index_k, mask_k, H, K)

    p_state = (seq.to(tl.int64) * HV + head_v) * V * K + tile_s
    b_s = tl.zeros([BLOCK_V, BLOCK_K], dtype=tl.float32)
    if dfinal is not None:
        b_s += tl.load(dfinal + p_state, mask=mask_s, other=0.0)
    zeros = tl.zeros([BLOCK_V, C], dtype=tl.float32)
    num_chunks = (end - begin + C - 1) // C
    place = (begin // C + seq + num_chunks - 1).to(tl.int64) * HV + head_v
    for turn in tl.range(0, num_chunks, num_stages=STAGES):
        done = (num_chunks - 1 - turn) * C
        token = (begin + done).to(tl.int64)
        mask_t = done + row < end - begin
        p_f = factors + place * 2 * C
        since_start = tl.load(p_f + row)
        until_end = tl.load(p_f + C + row)
        whole = tl.load(p_f + C - 1)
        b_beta = tl.load(beta + (token + row) * stride_beta + head_v, mask=mask_t, other=0.0)
        mask_tk = mask_t[:, None] & mask_k[None, :]
        mask_tv = mask_t[:, None] & mask_v[None, :]
        tile_k = row[:, None] * STRIDE_K + index_k[None, :]
        tile_q = row[:, None] * STRIDE_Q + index_k[None, :]
        tile_o = row[:, None] * STRIDE_O + index_v[None, :]
        b_k = tl.load(k + token * STRIDE_K + head_k * K + tile_k, mask=mask_tk, other=0.0)
        b_q = tl.load(q + token * STRIDE_Q + head_k * K + tile_q, mask=mask_tk, other=0.0)
        b_do = tl.load(dout + token * STRIDE_O + head_v * V + tile_o, mask=mask_tv, other=0.0)
        b_n = tl.load(solve + place * C * C + square)
        b_a = tl.load(attend + place * C * C + square)
        b_state = b_s.to(dtype)
        tl.store(dstates + place * V * K + tile_s, b_state, mask=mask_s)
        t_do = tl.trans(b_do)
        b_du = dot(t_do, b_a, dot(b_state, tl.trans(b_k), zeros) * until_end[None, :])
        b_de = b_du - dot((b_du * b_beta[None, :]).to(dtype), b_n, zeros)
        p_e = derrors + (token * HV + head_v) * V + row[None, :] * HV * V + index_v[:, None]
        tl.store(p_e, b_de.to(dtype), mask=mask_v[:, None] & mask_t[None, :])
        by_q = (t_do.to(tl.float32) * (since_start * scale)[None, :]).to(dtype)
        by_k = (b_de * (-b_beta * since_start)[None, :]).to(dtype)
        b_s = dot(by_k, b_k, dot(by_q, b_q, b_s * whole))
        place -= HV
    if dinitial is not None:
        tl.store(dinitial + p_state, b_s, mask=mask_s)


@triton.jit(do_not_specialize=["num_seqs"])
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
    dv: tl.tensor,
    dg: tl.tensor,
    dbeta: tl.tensor,
    scale: tl.tensor,
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
) -> None:
    """Compute the gradients of one chunk's inputs of one key head: one program.

    The grid is chunks by key heads. A program takes the value heads of its key head in turn, and of
    each BLOCK_V rows of the states; sums [C, K] for q, for keys that read and for keys that write
    stay in registers over all of them. A head's share of a sum is what it grew by.
    """
    chunk = tl.program_id(0) // H
    head_k = tl.program_id(0) % H
    _seq, _begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, chunk, C)
    if first_token >= end:
        return
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
        place = chunk.to(tl.int64) * HV + head_v
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
            tile_s = place * V * K + index_v[:, None] * K + index_k[None, :]
            b_do = tl.load(dout + tile_o, mask=mask_tv, other=0.0)
            b_e = tl.load(errors + tile_v, mask=mask_tv, other=0.0).to(tl.float32)
            b_de = tl.load(derrors + tile_v, mask=mask_tv, other=0.0)
            b_s = tl.load(states + tile_s, mask=mask_s, other=0.0)
            b_ds = tl.load(dstates + tile_s, mask=mask_s, other=0.0)
            d_whole += tl.sum(b_s.to(tl.float32) * b_ds.to(tl.float32), 1)
            f_de = b_de.to(tl.float32)
            d_beta += tl.sum(b_e * f_de, 1)
            tl.store(dv + tile_v, (f_de * b_beta[:, None]).to(dtype), mask=mask_tv)
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
