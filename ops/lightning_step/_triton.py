# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton": the states block by block, then the norm and the gate.

Two launches, of which the second begins while the first ends, where a GPU can; see README.md.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_hybrid.ops.triton.devices import launches_early
from torch_hybrid.ops.triton.state import Tile, zero_rows


def lightning_step(
    qkv: Tensor,
    gate: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    slopes: Tensor,
    norm_weight: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    activation: str,
    scale: float,
    norm_groups: int,
    norm_eps: float,
) -> Tensor:
    """Launcher of ``torch_hybrid::lightning_step``."""
    num_tokens, num_seqs = qkv.shape[0], state_indices.shape[0]
    _, num_heads, dim, _ = state.shape
    o = qkv.new_empty(num_tokens, num_heads * dim, dtype=torch.float32)
    if num_seqs == 0:
        return o.zero_() if gate is None else o.new_zeros(o.shape, dtype=qkv.dtype)
    early = launches_early(qkv.device)
    tile = Tile.of(dim, dim)
    num_blocks = triton.cdiv(dim, tile.block_v)
    _step_kernel[(num_blocks * num_heads * num_seqs,)](
        qkv,
        q_norm_weight,
        k_norm_weight,
        cos,
        sin,
        slopes,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
        o,
        scale,
        norm_eps,
        num_tokens,
        num_seqs,
        qkv.stride(0),
        0 if cos is None else cos.stride(0),
        0 if sin is None else sin.stride(0),
        H=num_heads,
        D=dim,
        HALF=0 if cos is None else cos.shape[1],
        BLOCK_K=tile.block_k,
        BLOCK_V=tile.block_v,
        SILU=activation == "silu",
        NORMED=gate is not None,
        EARLY=early,
        num_warps=1,
        enable_fp_fusion=True,
    )
    if gate is None or norm_weight is None:
        return o
    return _normed(o, gate, norm_weight, cu_seqlens, norm_eps, norm_groups, early)


def _normed(
    o: Tensor,
    gate: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor,
    eps: float,
    num_groups: int,
    early: bool,
) -> Tensor:
    """The outputs, normed and gated."""
    num_tokens, inner = o.shape
    out = gate.new_empty(num_tokens, inner)
    width = inner // num_groups
    block = triton.next_power_of_2(width)
    _norm_kernel[(num_tokens * num_groups,)](
        o,
        gate,
        weight,
        cu_seqlens,
        out,
        eps,
        cu_seqlens.shape[0] - 1,
        gate.stride(0),
        GROUPS=num_groups,
        WIDTH=width,
        BLOCK=block,
        EARLY=early,
        num_warps=min(16, max(1, block // 512)),
        launch_pdl=early,
    )
    return out


@triton.jit
def _prepared(
    row: tl.tensor,
    partner: tl.tensor,
    weight: tl.tensor | None,
    partner_weight: tl.tensor | None,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    HALF: tl.constexpr,
) -> tl.tensor:
    """A head's q or k, normed and rotated; ``partner`` has the channel that each turns with, and
    ``sin`` its sign."""
    if weight is not None:
        inverse = tl.rsqrt(tl.sum(row * row, 0) / D + eps)
        row = weight * (row * inverse)
    if HALF > 0:
        if weight is not None:
            partner = partner_weight * (partner * inverse)
        row = row * cos + partner * sin
    return row


@triton.jit
def _activated(x: tl.tensor, SILU: tl.constexpr) -> tl.tensor:
    """In float32, rounded as it is where it comes from a tensor."""
    wide = x.to(tl.float32)
    if SILU:
        wide = (wide / (1.0 + tl.exp(-wide))).to(x.dtype).to(tl.float32)
    return wide


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _step_kernel(
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
    o: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_qkv: tl.tensor,
    stride_cos: tl.tensor,
    stride_sin: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SILU: tl.constexpr,
    NORMED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program: BLOCK_V rows of the state of one head of one sequence.

    Each norms and rotates q and k for itself. What is small is asked for before the state.
    """
    if EARLY:
        gdc_launch_dependents()
    blocks: tl.constexpr = (D + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    seq = pid // (blocks * H)
    head = pid // blocks % H
    index = tl.arange(0, BLOCK_K)
    index_v = pid % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    mask, mask_v = index < D, index_v < D

    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    if begin < end:
        initial = tl.load(initial_indices + seq).to(tl.int64)
        slot = tl.load(state_indices + seq).to(tl.int64)
        token = begin.to(tl.int64)
        p_q = qkv + token * stride_qkv + head * D
        p_k, p_v = p_q + H * D, p_q + 2 * H * D
        b_q = tl.load(p_q + index, mask=mask, other=0.0)
        b_k = tl.load(p_k + index, mask=mask, other=0.0)
        b_v = tl.load(p_v + index_v, mask=mask_v, other=0.0)
        # The same at every token: what a GPU's own exponential is off by would add up.
        decay = tl.exp(-tl.load(slopes + head).to(tl.float64)).to(tl.float32)
        other_q, other_k, b_cos, b_sin = b_q, b_k, 1.0, 0.0
        w_q, w_k, other_w_q, other_w_k = None, None, None, None
        if q_norm_weight is not None:
            w_q = tl.load(q_norm_weight + index, mask=mask, other=0.0).to(tl.float32)
            w_k = tl.load(k_norm_weight + index, mask=mask, other=0.0).to(tl.float32)
        if HALF > 0:
            turns, angle = index < 2 * HALF, index % HALF
            partner = tl.where(index < HALF, index + HALF, index - HALF)
            other_q = tl.load(p_q + partner, mask=turns, other=0.0)
            other_k = tl.load(p_k + partner, mask=turns, other=0.0)
            b_cos = tl.load(cos + token * stride_cos + angle, mask=turns, other=1.0)
            b_sin = tl.load(sin + token * stride_sin + angle, mask=turns, other=0.0)
            b_sin = tl.where(index < HALF, -b_sin, b_sin)
            if q_norm_weight is not None:
                other_w_q = tl.load(q_norm_weight + partner, mask=turns, other=0.0).to(tl.float32)
                other_w_k = tl.load(k_norm_weight + partner, mask=turns, other=0.0).to(tl.float32)
        tile = head * D * D + index_v[:, None] * D + index[None, :]
        mask_s = mask_v[:, None] & mask[None, :]
        p_s = state + initial * H * D * D + tile
        b_s = tl.load(p_s, mask=mask_s & (initial != 0), other=0.0)

        b_q, other_q = _activated(b_q, SILU), _activated(other_q, SILU)
        b_k, other_k = _activated(b_k, SILU), _activated(other_k, SILU)
        b_q = _prepared(b_q, other_q, w_q, other_w_q, b_cos, b_sin, eps, D, HALF) * scale
        b_k = _prepared(b_k, other_k, w_k, other_w_k, b_cos, b_sin, eps, D, HALF)
        b_s = b_s * decay + _activated(b_v, SILU)[:, None] * b_k[None, :]
        b_o = tl.sum(b_s * b_q[None, :], 1)
        if q_norm_weight is None:
            b_o = b_o.to(qkv.dtype.element_ty)
        tl.store(o + token * H * D + head * D + index_v, b_o.to(tl.float32), mask=mask_v)
        tl.store(state + slot * H * D * D + tile, b_s, mask=mask_s & (slot != 0))

    if not NORMED:
        # The rows past the last sequence are dealt out to the sequences in turn.
        padding = tl.load(cu_seqlens + num_seqs) + seq
        zero_rows(o, padding, num_tokens, num_seqs, head, index_v, mask_v, H, D)


@triton.jit(do_not_specialize=["num_seqs"])
def _norm_kernel(
    o: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    cu_seqlens: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    num_seqs: tl.tensor,
    stride_gate: tl.tensor,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program: the norm and the gate of one group of a token's channels; 0 for padding."""
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < WIDTH
    mask = inside & (token < tl.load(cu_seqlens + num_seqs))
    channel = tl.program_id(0) % GROUPS * WIDTH + index
    b_g = tl.load(gate + token * stride_gate + channel, mask=mask, other=0.0).to(tl.float32)
    b_w = tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    row = token * GROUPS * WIDTH + channel
    b_o = tl.load(o + row, mask=mask, other=0.0)
    b_o = b_w * (b_o * tl.rsqrt(tl.sum(b_o * b_o, 0) / WIDTH + eps))
    b_o = b_o / (1.0 + tl.exp(-b_g))
    tl.store(out + row, b_o.to(out.dtype.element_ty), mask=inside)
