# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton" of the recurrent form: one pass over the state, in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.ssd.op import Ssd
from torch_hybrid.ops.triton.state import Tile, zero_rows


def recurrent_ssd(x: Ssd) -> Tensor:
    """Launch a program for some rows of each head's state."""
    q, k, v, g, dt = x.q, x.k, x.v, x.g, x.dt
    num_tokens, num_groups, head_dim_k = q.shape
    _, num_heads, head_dim_v = v.shape
    num_seqs = x.state_indices.shape[0]
    if num_seqs == 0:
        return torch.zeros_like(v, memory_format=torch.contiguous_format)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    tile = Tile.of(head_dim_v, head_dim_k)
    num_blocks = triton.cdiv(head_dim_v, tile.block_v)
    _recurrent_kernel[(num_blocks * num_heads * num_seqs,)](
        q,
        k,
        v,
        g,
        dt,
        x.D,
        x.state,
        x.cu_seqlens,
        x.initial_indices,
        x.state_indices,
        out,
        x.scale,
        num_tokens,
        num_seqs,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        g.stride(0),
        0 if dt is None else dt.stride(0),
        G=num_groups,
        H=num_heads,
        K=head_dim_k,
        V=head_dim_v,
        BLOCK_K=tile.block_k,
        BLOCK_V=tile.block_v,
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
    dt: tl.tensor | None,
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
    stride_dt: tl.tensor,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Walk all tokens of a sequence with BLOCK_V rows of the state of a head, in registers."""
    num_blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    seq = pid // (num_blocks * H)
    head = pid // num_blocks % H
    group = head // (H // G)
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
        p_q = q + first * stride_q + group * K + index_k
        p_k = k + first * stride_k + group * K + index_k
        p_v = v + first * stride_v + head * V + index_v
        p_g = g + first * stride_g + head
        p_out = out + (first * H + head) * V + index_v
        initial = tl.load(initial_indices + seq).to(tl.int64)
        slot = tl.load(state_indices + seq).to(tl.int64)
        tile_s = head * V * K + index_v[:, None] * K + index_k[None, :]
        if dt is not None:
            p_dt = dt + first * stride_dt + head
        if D is not None:
            skip = tl.load(D + head)

        p_s = state + initial * H * V * K + tile_s
        b_s = tl.load(p_s, mask=mask_s & (initial != 0), other=0.0)
        for _ in range(begin, end):
            b_q = tl.load(p_q, mask=mask_k, other=0.0).to(tl.float32) * scale
            b_k = tl.load(p_k, mask=mask_k, other=0.0).to(tl.float32)
            b_v = tl.load(p_v, mask=mask_v, other=0.0).to(tl.float32)
            b_u = b_v
            if dt is not None:
                b_u *= tl.load(p_dt)
                p_dt += stride_dt

            # A GPU's own exponential is off by several roundings, which add up over the tokens; in
            # float64 it is a library's, and one scalar per token hides behind the state.
            b_s *= tl.exp(tl.load(p_g).to(tl.float64)).to(tl.float32)
            b_s += b_u[:, None] * b_k[None, :]
            b_o = tl.sum(b_s * b_q[None, :], 1)
            if D is not None:
                b_o += skip * b_v
            tl.store(p_out, b_o.to(out.dtype.element_ty), mask=mask_v)

            p_q += stride_q
            p_k += stride_k
            p_v += stride_v
            p_g += stride_g
            p_out += H * V
        if slot != 0:
            tl.store(state + slot * H * V * K + tile_s, b_s, mask=mask_s)

    # The rows past the last sequence are dealt out to the sequences in turn.
    padding = tl.load(cu_seqlens + num_seqs) + seq
    zero_rows(out, padding, num_tokens, num_seqs, head, index_v, mask_v, H, V)
