"""Implementation "triton" of ``lightning_step``: walk the states, then norm and gate the outputs.

Two launches, of which the second begins while the first ends, where a GPU can (PDL). A step with
drafts, or by open chunks, has one before them. See README.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_hybrid.ops.ssd._triton_norm import SIGMOID, launch_norm
from torch_hybrid.ops.ssd._triton_step_open import read_open_chunks
from torch_hybrid.ops.ssd._triton_token import fixed_decay
from torch_hybrid.ops.ssd.op_step_lightning import LightningStep, empty_outputs
from torch_hybrid.ops.triton.early import follow
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.open_chunk import close_chunks
from torch_hybrid.ops.triton.state import Tile, zero_rows


def lightning_step(x: LightningStep) -> Tensor:
    """Launch the kernels: prepare tokens for drafts or open chunks, walk the states, norm."""
    num_tokens = x.qkv.shape[0]
    if x.state_indices.shape[0] == 0:
        return empty_outputs(x).zero_()
    if x.chunk is not None and not num_tokens:
        close_chunks(x, None)
        return empty_outputs(x)
    o = x.qkv.new_empty(num_tokens, x.width, dtype=torch.float32)
    prepares = x.records is not None or x.chunk is not None
    prepared = _prepare(x) if prepares else None
    if x.chunk is None or prepared is None:
        _walk(x, prepared, o)
    else:
        _read_open_chunks(x, prepared, o)
    if x.gate is None or x.norm_weight is None:
        return o
    out = empty_outputs(x)
    launch_norm(o, x.gate, x.norm_weight, x, out=out, gated_by=SIGMOID)
    return out


def _prepare(x: LightningStep) -> Tensor:
    """Prepare rows [q | k | v] of new tokens, and after them of each sequence's records, without
    q."""
    num_tokens, num_seqs = x.qkv.shape[0], x.state_indices.shape[0]
    _, num_heads, dim, _ = x.state.shape
    num_drafts = None if x.records is None else x.records.shape[1]
    num_rows = num_tokens + num_seqs * (num_drafts or 0)
    prepared = x.state.new_empty(num_rows, 3 * x.width)
    bind(_prepare_kernel, x)[(num_seqs * num_heads,)](
        prepared=prepared,
        DRAFTS=num_drafts,
        BLOCK=Tile.of(dim, dim).block_k,
        SILU=x.activation == "silu",
        num_warps=1,
        enable_fp_fusion=False,
    )
    return prepared


def _read_open_chunks(x: LightningStep, prepared: Tensor, o: Tensor) -> None:
    """Add the tokens' records to the open chunks, and store what queries read in ``o``."""
    read_open_chunks(
        x,
        prepared,
        o,
        {"VALUES": 2 * x.width, "KEYS": x.width, "QUERIES": 0},
        rounded=x.qkv if x.q_norm_weight is None else o,
        **dict.fromkeys(("z", "dt", "A_log", "dt_bias", "D", "dt_min", "dt_max")),
    )


def _walk(x: LightningStep, prepared: Tensor | None, o: Tensor) -> None:
    """Advance the states by the tokens, and store what queries read in ``o``."""
    _, num_heads, dim, _ = x.state.shape
    num_seqs = x.state_indices.shape[0]
    tile = Tile.of(dim, dim)
    num_blocks = triton.cdiv(dim, tile.block_v)
    bind(_walk_kernel, x)[(num_blocks * num_heads * num_seqs,)](
        prepared=prepared,
        o=o,
        DRAFTS=None if x.records is None else x.records.shape[1],
        BLOCK_K=tile.block_k,
        BLOCK_V=tile.block_v,
        SILU=x.activation == "silu",
        NORMED=x.gate is not None,
        num_warps=1,
        enable_fp_fusion=False,
    )


@triton.jit
def _row(p_row: tl.tensor, index: tl.tensor, mask: tl.tensor, HALF: tl.constexpr) -> tl.tuple:
    """Load a head's q or k, and beside each channel the one that it is rotated with."""
    b_x = tl.load(p_row + index, mask=mask, other=0.0)
    other = b_x
    if HALF > 0:
        partner = tl.where(index < HALF, index + HALF, index - HALF)
        other = tl.load(p_row + partner, mask=index < 2 * HALF, other=0.0)
    return b_x, other


@triton.jit
def _angles(
    cos: tl.tensor | None,
    sin: tl.tensor | None,
    token: tl.tensor,
    stride_cos: tl.tensor,
    stride_sin: tl.tensor,
    index: tl.tensor,
    HALF: tl.constexpr,
) -> tl.tuple:
    """Load each channel's cosine and signed sine: 1 and 0 where it is not rotated."""
    b_cos = tl.full(index.shape, 1.0, tl.float32)
    b_sin = tl.zeros(index.shape, tl.float32)
    if HALF > 0:
        turns, angle = index < 2 * HALF, index % HALF
        b_cos = tl.load(cos + token * stride_cos + angle, mask=turns, other=1.0)
        b_sin = tl.load(sin + token * stride_sin + angle, mask=turns, other=0.0)
        b_sin = tl.where(index < HALF, -b_sin, b_sin)
    return b_cos, b_sin


@triton.jit
def _activated(x: tl.tensor, SILU: tl.constexpr) -> tl.tensor:
    """Activate in float32, and round to the dtype of the input."""
    wide = x.to(tl.float32)
    if SILU:
        wide = (wide / (1.0 + tl.exp(-wide))).to(x.dtype).to(tl.float32)
    return wide


# A state is to have the same bits with drafts and without: nothing is fused in these but what is
# written as ``fma``, as the compiler would choose by what stands beside.
@triton.jit
def _prepared(
    row: tl.tuple,
    weight: tl.tuple,
    angles: tl.tuple,
    norm_eps: tl.tensor,
    D: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    SILU: tl.constexpr,
) -> tl.tensor:
    """Prepare a head's q or k: activate it, norm it with its weights and rotate it."""
    b_x, other = _activated(row[0], SILU), _activated(row[1], SILU)
    inverse = 1.0
    if NORM:
        inverse = tl.rsqrt(tl.sum(b_x * b_x, 0) / D + norm_eps)
        b_x = weight[0].to(tl.float32) * (b_x * inverse)
    if HALF > 0:
        if NORM:
            other = weight[1].to(tl.float32) * (other * inverse)
        b_x = tl.fma(b_x, angles[0], other * angles[1])
    return b_x


@triton.jit
def _next_state(b_s: tl.tensor, b_k: tl.tensor, b_v: tl.tensor, decay: tl.tensor) -> tl.tensor:
    """Advance rows of a head's state by one token."""
    return tl.fma(b_v[:, None], b_k[None, :], b_s * decay)


@triton.jit
def _read(
    b_s: tl.tensor, b_q: tl.tensor, q_norm_weight: tl.tensor | None, dtype: tl.constexpr
) -> tl.tensor:
    """Multiply rows of a head's state by q; the result is rounded unless q and k are normed."""
    b_o = tl.sum(b_s * b_q[None, :], 1)
    if q_norm_weight is None:
        b_o = b_o.to(dtype).to(tl.float32)
    return b_o


@triton.jit(do_not_specialize=["num_tokens"])
def _prepare_kernel(
    qkv: tl.tensor,
    q_norm_weight: tl.tensor | None,
    k_norm_weight: tl.tensor | None,
    cos: tl.tensor | None,
    sin: tl.tensor | None,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    accepted: tl.tensor | None,
    records: tl.tensor | None,
    prepared: tl.tensor,
    scale: tl.tensor,
    norm_eps: tl.tensor,
    num_tokens: tl.tensor,
    stride_qkv: tl.tensor,
    stride_cos: tl.tensor,
    stride_sin: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Prepare one head's q, k and v of all tokens of one sequence.

    Grid: heads times sequences. Tile: one warp with BLOCK channels, token after token. No other
    program reads or writes the head's records: it copies accepted ones before it stores the
    drafts'.
    """
    follow(EARLY)
    if EARLY:
        gdc_launch_dependents()
    seq = tl.program_id(0) // H
    head = tl.program_id(0) % H
    index = tl.arange(0, BLOCK)
    mask = index < D
    width: tl.constexpr = H * D
    begin = tl.load(cu_seqlens + seq)
    num_new = tl.load(cu_seqlens + seq + 1) - begin
    if DRAFTS is not None:
        initial = tl.load(initial_indices + seq).to(tl.int64)
        slot = tl.load(state_indices + seq).to(tl.int64)
        of_head = head * D + index
        p_record = records + initial * DRAFTS * 2 * width + of_head
        p_before = prepared + (num_tokens.to(tl.int64) + seq * DRAFTS) * 3 * width + of_head
        for i in range(tl.load(accepted + seq)):
            for part in tl.static_range(2):
                b_x = tl.load(p_record + (2 * i + part) * width, mask=mask)
                tl.store(p_before + (3 * i + 1 + part) * width, b_x, mask=mask)
        tl.debug_barrier()  # all threads of this program have read what is left anew here
    for i in range(num_new):
        token = begin.to(tl.int64) + i
        p_q = qkv + token * stride_qkv + head * D
        p_k = p_q + width
        x_q, x_k = _row(p_q, index, mask, HALF), _row(p_k, index, mask, HALF)
        b_v = _activated(tl.load(p_k + width + index, mask=mask, other=0.0), SILU)
        w_q, w_k = x_q, x_k
        if q_norm_weight is not None:
            w_q = _row(q_norm_weight, index, mask, HALF)
            w_k = _row(k_norm_weight, index, mask, HALF)
        angles = _angles(cos, sin, token, stride_cos, stride_sin, index, HALF)
        normed: tl.constexpr = q_norm_weight is not None
        b_q = _prepared(x_q, w_q, angles, norm_eps, D, HALF, normed, SILU) * scale
        b_k = _prepared(x_k, w_k, angles, norm_eps, D, HALF, normed, SILU)
        p_row = prepared + token * 3 * width + head * D + index
        tl.store(p_row, b_q, mask=mask)
        tl.store(p_row + width, b_k, mask=mask)
        tl.store(p_row + 2 * width, b_v, mask=mask)
        if DRAFTS is not None:
            is_draft = mask & (i > 0) & (slot != 0)
            p_draft = records + (slot * DRAFTS + i - 1) * 2 * width + head * D + index
            tl.store(p_draft, b_k, mask=is_draft)
            tl.store(p_draft + width, b_v, mask=is_draft)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _walk_kernel(
    qkv: tl.tensor,
    q_norm_weight: tl.tensor | None,
    k_norm_weight: tl.tensor | None,
    cos: tl.tensor | None,
    sin: tl.tensor | None,
    slopes: tl.tensor,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    accepted: tl.tensor | None,
    prepared: tl.tensor | None,
    o: tl.tensor,
    scale: tl.tensor,
    norm_eps: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_qkv: tl.tensor,
    stride_cos: tl.tensor,
    stride_sin: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    DRAFTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SILU: tl.constexpr,
    NORMED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Walk BLOCK_V rows of one head's state of one sequence through its tokens.

    Grid: blocks of rows times heads times sequences. Registers: one warp holds the rows, all of K.
    Memory: a state is loaded once, and stored after the first new token; accepted records come
    first.

    With DRAFTS, the launch before has prepared q, k and v. In decode steps (None) a sequence has at
    most one token, and each program norms and rotates q and k itself. Small inputs are loaded
    before the state.
    """
    if DRAFTS is None:
        follow(EARLY)
    if EARLY:
        gdc_launch_dependents()
    blocks: tl.constexpr = (D + BLOCK_V - 1) // BLOCK_V
    width: tl.constexpr = H * D
    pid = tl.program_id(0)
    seq = pid // (blocks * H)
    head = pid // blocks % H
    index = tl.arange(0, BLOCK_K)
    index_v = pid % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    mask, mask_v = index < D, index_v < D

    begin = tl.load(cu_seqlens + seq)
    num_new = tl.load(cu_seqlens + seq + 1) - begin
    num_walked = num_new
    if DRAFTS is not None:
        num_replayed = tl.load(accepted + seq)
        num_walked += num_replayed
    if num_walked > 0:
        initial = tl.load(initial_indices + seq).to(tl.int64)
        slot = tl.load(state_indices + seq).to(tl.int64)
        token = begin.to(tl.int64)
        if DRAFTS is None:
            p_q = qkv + token * stride_qkv + head * D
            p_k, p_v = p_q + width, p_q + 2 * width
            x_q, x_k = _row(p_q, index, mask, HALF), _row(p_k, index, mask, HALF)
            b_v = tl.load(p_v + index_v, mask=mask_v, other=0.0)
            decay = fixed_decay(tl.load(slopes + head))
            w_q, w_k = x_q, x_k
            if q_norm_weight is not None:
                w_q = _row(q_norm_weight, index, mask, HALF)
                w_k = _row(k_norm_weight, index, mask, HALF)
            angles = _angles(cos, sin, token, stride_cos, stride_sin, index, HALF)
            tile = head * D * D + index_v[:, None] * D + index[None, :]
            mask_s = mask_v[:, None] & mask[None, :]
            p_s = state + initial * H * D * D + tile
            b_s = tl.load(p_s, mask=mask_s & (initial != 0), other=0.0)

            normed: tl.constexpr = q_norm_weight is not None
            b_q = _prepared(x_q, w_q, angles, norm_eps, D, HALF, normed, SILU) * scale
            b_k = _prepared(x_k, w_k, angles, norm_eps, D, HALF, normed, SILU)
            b_s = _next_state(b_s, b_k, _activated(b_v, SILU), decay)
            b_o = _read(b_s, b_q, q_norm_weight, qkv.dtype.element_ty)
            tl.store(o + token * width + head * D + index_v, b_o, mask=mask_v)
            tl.store(state + slot * H * D * D + tile, b_s, mask=mask_s & (slot != 0))
        else:
            last_certain = num_replayed + tl.minimum(num_new, 1) - 1
            decay = fixed_decay(tl.load(slopes + head))
            tile = head * D * D + index_v[:, None] * D + index[None, :]
            mask_s = mask_v[:, None] & mask[None, :]
            p_s = state + initial * H * D * D + tile
            b_s = tl.load(p_s, mask=mask_s & (initial != 0), other=0.0)
            p_before = prepared + (num_tokens.to(tl.int64) + seq * DRAFTS) * 3 * width + head * D
            p_new = prepared + token * 3 * width + head * D

            if EARLY:
                gdc_wait()
            for i in range(num_walked):
                is_new = i >= num_replayed
                place = i - num_replayed
                p_row = tl.where(is_new, p_new + place * 3 * width, p_before + i * 3 * width)
                b_k = tl.load(p_row + width + index, mask=mask, other=0.0)
                b_v = tl.load(p_row + 2 * width + index_v, mask=mask_v, other=0.0)
                b_s = _next_state(b_s, b_k, b_v, decay)
                if i == last_certain:
                    tl.store(state + slot * H * D * D + tile, b_s, mask=mask_s & (slot != 0))
                if is_new:
                    b_q = tl.load(p_row + index, mask=mask, other=0.0)
                    b_o = _read(b_s, b_q, q_norm_weight, qkv.dtype.element_ty)
                    tl.store(o + (token + place) * width + head * D + index_v, b_o, mask=mask_v)

    if DRAFTS is not None and EARLY:
        gdc_wait()
    if not NORMED:
        # The rows past the last sequence are dealt out to the sequences in turn.
        padding = tl.load(cu_seqlens + num_seqs) + seq
        zero_rows(o, padding, num_tokens, num_seqs, head, index_v, mask_v, H, D)
