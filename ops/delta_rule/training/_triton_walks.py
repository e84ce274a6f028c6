# mypy: disable-error-code="untyped-decorator"
"""Walks of both rules' backwards in Triton: states forwards, and their gradients backwards.

Tables of rows are [T, HV, ...], and a chunk's are at its tokens. States stand between two chunks of
a sequence (``place_of_state``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.delta_rule.training.op import TrainedDeltaRule
from torch_hybrid.ops.triton.decays import exp
from torch_hybrid.ops.triton.devices import PROCESSORS, is_hopper
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.products import dot
from torch_hybrid.ops.triton.ragged import place_of_state
from torch_hybrid.ops.triton.state import zero_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Tables that both walks read; of a decay by head, k is what reads and writes.

    ``queries``, ``reads`` and ``writes`` [T, H, K] are q, k and k, or those decayed by channel:
    scaled, from the start of the chunk, and to its end. ``decays``: [2, T, HV] factors from the
    start and to the end, or [T, HV, K] sums of log decays from the start. ``solve`` and ``attend``
    [T, HV, C].
    """

    queries: Tensor
    reads: Tensor
    writes: Tensor | None
    decays: Tensor
    solve: Tensor
    attend: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """Results of both walks: states [X, HV, V, K] before chunks and their gradients behind them,
    and [T, HV, V] errors and their gradients."""

    states: Tensor
    dstates: Tensor
    errors: Tensor
    derrors: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    """Rows of V of a state that a program walks with, by so many warps, fetched so far ahead."""

    block_v: int
    num_stages: int
    num_warps: int = 4


def empty_walked(x: TrainedDeltaRule, chunk: int) -> Walked:
    """Allocate what walks leave, of chunks of so many tokens."""
    num_tokens, num_heads, v_dim = x.v.shape
    between = triton.cdiv(num_tokens, chunk)
    states, dstates = (
        x.v.new_empty(
            between + (0 if given is None else x.num_seqs), num_heads, v_dim, x.k.shape[2]
        )
        for given in (x.initial_state, x.dfinal_state)
    )
    errors, derrors = (x.v.new_empty(x.v.shape) for _ in range(2))
    return Walked(states=states, dstates=dstates, errors=errors, derrors=derrors)


def walk_states(x: TrainedDeltaRule, rows: Rows, out: Walked, sizes: dict[str, int]) -> None:
    """Fill in states and errors.

    ``sizes``: tokens C of a chunk, and BLOCK_K, which K fits.
    """
    _, num_heads, v_dim = x.v.shape
    walk, _ = _walks(x.v, num_heads * x.num_seqs, by_channel=rows.writes is not None)
    grid = (triton.cdiv(v_dim, walk.block_v) * num_heads * x.num_seqs,)
    bind(_states_kernel, x, rows, out, walk)[grid](
        initial=x.initial_state,
        states=out.states,
        STRIDE_K=rows.reads.stride(0),
        **sizes,
        STAGES=walk.num_stages,
        num_warps=walk.num_warps,
        enable_fp_fusion=True,
    )


def walk_gradients(
    x: TrainedDeltaRule,
    rows: Rows,
    out: Walked,
    grads: tuple[Tensor, ...],
    sizes: dict[str, int],
) -> None:
    """Fill in gradients of states, errors, v and initial states, and of padding, which are 0.

    ``grads``: of q, k, v, g, beta and the initial state.
    """
    _, num_heads, v_dim = x.v.shape
    _, walk = _walks(x.v, num_heads * x.num_seqs, by_channel=rows.writes is not None)
    dq, dk, dv, dg, dbeta, dinitial = grads
    grid = (triton.cdiv(v_dim, walk.block_v) * num_heads * x.num_seqs,)
    bind(_gradients_kernel, x, rows, out, walk)[grid](
        dfinal=x.dfinal_state,
        dinitial=dinitial if x.initial_state is not None else None,
        dq=dq,
        dk=dk,
        dv=dv,
        dg=dg,
        dbeta=dbeta,
        STRIDE_Q=rows.queries.stride(0),
        STRIDE_K=rows.reads.stride(0),
        STRIDE_O=x.dout.stride(0),
        **sizes,
        STAGES=walk.num_stages,
        num_warps=walk.num_warps,
        enable_fp_fusion=True,
    )


def rows_of_v(v_dim: int) -> int:
    """Round V up to what products take."""
    rows: int = triton.next_power_of_2(v_dim)
    return max(16, rows)


def _walks(v: Tensor, num_states: int, *, by_channel: bool) -> tuple[_Walk, _Walk]:
    """Choose how both walks cut states: narrow ones where few states would leave a GPU idle.

    On an H200, 32 heads of 128, one sequence of 8192 tokens takes 274 and 319 us, eight of 1024 135
    and 142; those 226 backwards by 64 rows and four warps.
    """
    most = rows_of_v(v.shape[-1])
    if v.dtype == torch.float32:
        narrow = _Walk(block_v=16, num_stages=2)
        return narrow, narrow
    if num_states < PROCESSORS or not is_hopper(v.device):
        return _Walk(block_v=min(32, most), num_stages=3), _Walk(block_v=16, num_stages=3)
    # Rows decayed by channel are one table more: three stages do not fit shared memory.
    wide = _Walk(block_v=min(128, most), num_stages=2 if by_channel else 3, num_warps=8)
    return _Walk(block_v=min(64, most), num_stages=2), wide


@triton.jit(do_not_specialize=["num_tokens"])
def _states_kernel(
    reads: tl.tensor,
    writes: tl.tensor | None,
    v: tl.tensor,
    beta: tl.tensor,
    solve: tl.tensor,
    decays: tl.tensor,
    initial: tl.tensor | None,
    cu_seqlens: tl.tensor,
    states: tl.tensor,
    errors: tl.tensor,
    num_tokens: tl.tensor,
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

    The grid is sequences by value heads by rows of V. Tiles have rows of V, so that numbers pass
    from product to product in registers.
    """
    NUM_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    BY_CHANNEL: tl.constexpr = writes is not None
    dtype: tl.constexpr = reads.dtype.element_ty
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
    tile_n = row[:, None] * (HV * C) + row[None, :]
    tile_k = row[:, None] * STRIDE_K + index_k[None, :]
    tile_v = row[:, None] * STRIDE_V + index_v[None, :]
    b_s = tl.zeros([BLOCK_V, BLOCK_K], dtype=tl.float32)
    if initial is not None:
        p_initial = initial + (seq.to(tl.int64) * HV + head_v) * V * K
        b_s += tl.load(p_initial + tile_s, mask=mask_s, other=0.0)
    zeros = tl.zeros([BLOCK_V, C], dtype=tl.float32)
    for done in tl.range(0, end - begin, C, num_stages=STAGES):
        token = (begin + done).to(tl.int64)
        mask_t = done + row < end - begin
        last = tl.minimum(token + C, end) - 1
        b_beta = tl.load(beta + (token + row) * stride_beta + head_v, mask=mask_t, other=0.0)
        mask_tk = mask_t[:, None] & mask_k[None, :]
        mask_tv = mask_t[:, None] & mask_v[None, :]
        b_k = tl.load(reads + token * STRIDE_K + head_k * K + tile_k, mask=mask_tk, other=0.0)
        b_v = tl.load(v + token * STRIDE_V + head_v * V + tile_v, mask=mask_tv, other=0.0)
        p_n = solve + (token * HV + head_v) * C + tile_n
        b_n = tl.load(p_n, mask=mask_t[:, None], other=0.0)
        b_state = b_s.to(dtype)
        is_first = done == 0
        place = place_of_state(begin + done, is_first, seq, num_tokens, C)
        is_kept = mask_s if initial is not None else mask_s & (done > 0)
        tl.store(
            states + (place.to(tl.int64) * HV + head_v) * V * K + tile_s, b_state, mask=is_kept
        )
        read = dot(b_state, tl.trans(b_k), zeros)
        if BY_CHANNEL:
            b_write = tl.load(
                writes + token * STRIDE_K + head_k * K + tile_k, mask=mask_tk, other=0.0
            )
            p_total = decays + (last * HV + head_v) * K + index_k
            total = tl.load(p_total, mask=mask_k, other=0.0)
            b_r = tl.trans(b_v).to(tl.float32) - read
            b_e = b_r - dot((b_r * b_beta[None, :]).to(dtype), tl.trans(b_n), zeros)
            b_s = b_s * exp(total.to(tl.float32))[None, :]
            b_s = dot((b_e * b_beta[None, :]).to(dtype), b_write, b_s)
        else:
            p_f = decays + token * HV + head_v
            since_start = tl.load(p_f + row * HV, mask=mask_t, other=0.0)
            p_end = p_f + num_tokens.to(tl.int64) * HV
            until_end = tl.load(p_end + row * HV, mask=mask_t, other=0.0)
            whole = tl.load(decays + last * HV + head_v)
            b_r = tl.trans(b_v).to(tl.float32) - read * since_start[None, :]
            b_e = b_r - dot((b_r * b_beta[None, :]).to(dtype), tl.trans(b_n), zeros)
            b_s = dot((b_e * (b_beta * until_end)[None, :]).to(dtype), b_k, b_s * whole)
        p_e = errors + (token * HV + head_v) * V + row[None, :] * HV * V + index_v[:, None]
        tl.store(p_e, b_e.to(dtype), mask=mask_v[:, None] & mask_t[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _gradients_kernel(
    queries: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor | None,
    beta: tl.tensor,
    dout: tl.tensor,
    solve: tl.tensor,
    attend: tl.tensor,
    decays: tl.tensor,
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

    The grid and the tiles are those of the states.
    """
    NUM_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    BY_CHANNEL: tl.constexpr = writes is not None
    dtype: tl.constexpr = reads.dtype.element_ty
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
    tile_n = row[:, None] * (HV * C) + row[None, :]
    tile_k = row[:, None] * STRIDE_K + index_k[None, :]
    tile_q = row[:, None] * STRIDE_Q + index_k[None, :]
    tile_o = row[:, None] * STRIDE_O + index_v[None, :]

    # The rows past the last sequence are dealt out to the sequences in turn.
    padding = tl.load(cu_seqlens + num_seqs) + seq
    zero_rows(dv, padding, num_tokens, num_seqs, head_v, index_v, mask_v, HV, V)
    if pid % NUM_BLOCKS == 0:
        if BY_CHANNEL:
            zero_rows(dg, padding, num_tokens, num_seqs, head_v, index_k, mask_k, HV, K)
        else:
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
    for turn in tl.range(0, num_chunks, num_stages=STAGES):
        done = (num_chunks - 1 - turn) * C
        token = (begin + done).to(tl.int64)
        mask_t = done + row < end - begin
        last = tl.minimum(token + C, end) - 1
        b_beta = tl.load(beta + (token + row) * stride_beta + head_v, mask=mask_t, other=0.0)
        mask_tk = mask_t[:, None] & mask_k[None, :]
        mask_tv = mask_t[:, None] & mask_v[None, :]
        b_k = tl.load(reads + token * STRIDE_K + head_k * K + tile_k, mask=mask_tk, other=0.0)
        b_q = tl.load(queries + token * STRIDE_Q + head_k * K + tile_q, mask=mask_tk, other=0.0)
        b_do = tl.load(dout + token * STRIDE_O + head_v * V + tile_o, mask=mask_tv, other=0.0)
        p_n = (token * HV + head_v) * C + tile_n
        b_n = tl.load(solve + p_n, mask=mask_t[:, None], other=0.0)
        b_a = tl.load(attend + p_n, mask=mask_t[:, None], other=0.0)
        b_state = b_s.to(dtype)
        is_last = turn == 0
        place = place_of_state(begin + done + C, is_last, seq, num_tokens, C)
        is_kept = mask_s if dfinal is not None else mask_s & (turn > 0)
        tl.store(
            dstates + (place.to(tl.int64) * HV + head_v) * V * K + tile_s, b_state, mask=is_kept
        )
        t_do = tl.trans(b_do)
        if BY_CHANNEL:
            b_write = tl.load(
                writes + token * STRIDE_K + head_k * K + tile_k, mask=mask_tk, other=0.0
            )
            p_total = decays + (last * HV + head_v) * K + index_k
            total = tl.load(p_total, mask=mask_k, other=0.0)
            b_du = dot(t_do, b_a, dot(b_state, tl.trans(b_write), zeros))
            b_de = b_du - dot((b_du * b_beta[None, :]).to(dtype), b_n, zeros)
            by_q = t_do
            by_k = (b_de * -b_beta[None, :]).to(dtype)
            b_s = b_s * exp(total.to(tl.float32))[None, :]
        else:
            p_f = decays + token * HV + head_v
            since_start = tl.load(p_f + row * HV, mask=mask_t, other=0.0)
            p_end = p_f + num_tokens.to(tl.int64) * HV
            until_end = tl.load(p_end + row * HV, mask=mask_t, other=0.0)
            whole = tl.load(decays + last * HV + head_v)
            b_du = dot(t_do, b_a, dot(b_state, tl.trans(b_k), zeros) * until_end[None, :])
            b_de = b_du - dot((b_du * b_beta[None, :]).to(dtype), b_n, zeros)
            by_q = (t_do.to(tl.float32) * (since_start * scale)[None, :]).to(dtype)
            by_k = (b_de * (-b_beta * since_start)[None, :]).to(dtype)
            b_s = b_s * whole
        p_e = derrors + (token * HV + head_v) * V + row[None, :] * HV * V + index_v[:, None]
        tl.store(p_e, b_de.to(dtype), mask=mask_v[:, None] & mask_t[None, :])
        p_dv = dv + (token * HV + head_v) * V + row[None, :] * HV * V + index_v[:, None]
        b_dv = (b_de * b_beta[None, :]).to(dtype)
        tl.store(p_dv, b_dv, mask=mask_v[:, None] & mask_t[None, :])
        b_s = dot(by_k, b_k, dot(by_q, b_q, b_s))
    if dinitial is not None:
        tl.store(dinitial + p_state, b_s, mask=mask_s)
