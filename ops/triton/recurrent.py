"""The recurrent form of delta rules and of SSD in Triton: one pass over the state, in registers.

The decay ``g`` is one of a head ``[T, HV]``, or one of each of its channels ``[T, HV, K]``. A step
size is what a token's value enters the state with: ``beta``, or ``dt``.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.state import Tile, zero_rows


class RecurrentRule(Protocol):
    """Arguments that the rules share, as their ops describe them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    state: Tensor
    cu_seqlens: Tensor
    initial_indices: Tensor
    state_indices: Tensor
    scale: float


def launch_recurrent(
    x: RecurrentRule,
    step_size: Tensor | None,
    *,
    D: Tensor | None = None,
    is_delta: bool,
    by_channel: bool = False,
    qk_l2norm: bool = False,
) -> Tensor:
    """Launch the kernel, one program a tile of a head's state."""
    _, num_k_heads, head_dim_k = x.q.shape
    _, num_v_heads, head_dim_v = x.v.shape
    num_seqs = x.state_indices.shape[0]
    if num_seqs == 0:
        return torch.zeros_like(x.v, memory_format=torch.contiguous_format)
    out = torch.empty_like(x.v, memory_format=torch.contiguous_format)
    tile = Tile.of(head_dim_v, head_dim_k, by_channel=by_channel)
    num_blocks = triton.cdiv(head_dim_v, tile.block_v)
    bind(_recurrent_kernel, x)[(num_blocks * num_v_heads * num_seqs,)](
        step_size=step_size,
        D=D,
        out=out,
        H=num_k_heads,
        HV=num_v_heads,
        K=head_dim_k,
        V=head_dim_v,
        BLOCK_K=tile.block_k,
        BLOCK_V=tile.block_v,
        DELTA=is_delta,
        BY_CHANNEL=by_channel,
        QK_L2NORM=qk_l2norm,
        num_warps=1,
        enable_fp_fusion=True,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _recurrent_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    step_size: tl.tensor | None,
    D: tl.tensor | None,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    stride_g: tl.tensor,
    stride_step_size: tl.tensor,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DELTA: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    QK_L2NORM: tl.constexpr,
) -> None:
    """Walk all tokens of a sequence with BLOCK_V rows of a head's state: one program, one warp.

    With DELTA a state is corrected by what it reads at the key, else keys and values are added.
    The grid is sequences by value heads by rows of V; the tile [BLOCK_V, BLOCK_K] is in registers.
    """
    num_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    seq = pid // (num_blocks * HV)
    head_v = pid // num_blocks % HV
    head_k = head_v // (HV // H)
    index_k = tl.arange(0, BLOCK_K)
    index_v = pid % num_blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = index_k < K
    mask_v = index_v < V
    mask_s = mask_v[:, None] & mask_k[None, :]

    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    if begin < end:
        # Pointers advance token by token: offsets from the base of a pool or of a long batch
        # do not fit 32 bits.
        first = begin.to(tl.int64)
        p_q = q + first * stride_q + head_k * K + index_k
        p_k = k + first * stride_k + head_k * K + index_k
        p_v = v + first * stride_v + head_v * V + index_v
        p_g = g + first * stride_g + (head_v * K + index_k if BY_CHANNEL else head_v)
        if DELTA:
            p_step = step_size + first * stride_step_size + head_v
        p_out = out + (first * HV + head_v) * V + index_v
        initial = tl.load(initial_indices + seq).to(tl.int64)
        slot = tl.load(state_indices + seq).to(tl.int64)
        tile_s = head_v * V * K + index_v[:, None] * K + index_k[None, :]
        if not DELTA and step_size is not None:
            p_step = step_size + first * stride_step_size + head_v
        if D is not None:
            skip = tl.load(D + head_v)

        p_s = state + initial * HV * V * K + tile_s
        b_s = tl.load(p_s, mask=mask_s & (initial != 0), other=0.0)
        for _ in range(begin, end):
            b_q = tl.load(p_q, mask=mask_k, other=0.0).to(tl.float32)
            b_k = tl.load(p_k, mask=mask_k, other=0.0).to(tl.float32)
            b_v = tl.load(p_v, mask=mask_v, other=0.0).to(tl.float32)
            b_u = b_v
            if not DELTA and step_size is not None:
                b_u *= tl.load(p_step)
                p_step += stride_step_size
            if QK_L2NORM:
                b_q *= tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6)
                b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
            b_q *= scale

            # A GPU's own exponential is off by several roundings, which add up over the tokens; in
            # float64 it is a library's, and few of them per token hide behind the state.
            if BY_CHANNEL:
                b_g = tl.load(p_g, mask=mask_k, other=0.0)
                b_s *= tl.exp(b_g.to(tl.float64)).to(tl.float32)[None, :]
            else:
                b_s *= tl.exp(tl.load(p_g).to(tl.float64)).to(tl.float32)
            if DELTA:
                b_u = tl.load(p_step) * (b_v - tl.sum(b_s * b_k[None, :], 1))
            b_s += b_u[:, None] * b_k[None, :]
            b_o = tl.sum(b_s * b_q[None, :], 1)
            if D is not None:
                b_o += skip * b_v
            tl.store(p_out, b_o.to(out.dtype.element_ty), mask=mask_v)

            p_q += stride_q
            p_k += stride_k
            p_v += stride_v
            p_g += stride_g
            if DELTA:
                p_step += stride_step_size
            p_out += HV * V
        if slot != 0:
            tl.store(state + slot * HV * V * K + tile_s, b_s, mask=mask_s)

    # The rows past the last sequence are dealt out to the sequences in turn.
    padding = tl.load(cu_seqlens + num_seqs) + seq
    zero_rows(out, padding, num_tokens, num_seqs, head_v, index_v, mask_v, HV, V)
