"""Definition of the decode step: one sequence after the other, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.delta_rule.op_step_gated import GatedDeltaStep


def gated_delta_step_reference(x: GatedDeltaStep) -> Tensor:
    """Compute the op in float32, or in float64 when ``qkv`` is float64; pools are **mutated**."""
    dtype = x.qkv.dtype
    work = torch.promote_types(dtype, torch.float32)
    num_heads, v_dim, k_dim = x.state.shape[1:]
    g = -x.A_log.to(work).exp() * F.softplus(x.a.to(work) + x.dt_bias.to(work))
    beta = x.b.to(work).sigmoid() * x.beta_scale

    out = torch.zeros_like(x.z, memory_format=torch.contiguous_format)
    offsets = x.cu_seqlens.tolist()
    slots = zip(x.initial_indices.tolist(), x.state_indices.tolist(), strict=True)
    for n, (initial, slot) in enumerate(slots):
        t = offsets[n]
        if offsets[n + 1] == t:
            continue
        past = x.conv_state[initial] if initial else torch.zeros_like(x.conv_state[0])
        S = x.state[initial].to(work) if initial else torch.zeros_like(x.state[0], dtype=work)

        window = torch.cat([past, x.qkv[t : t + 1]])
        y = (window.to(work) * x.conv_weight.to(work).T).sum(0)
        y = y if x.conv_bias is None else y + x.conv_bias.to(work)
        y = (F.silu(y) if x.activation == "silu" else y).to(dtype).to(work)

        q, k, v = y.split(x.widths)
        q, k = (_unit_heads(part.view(-1, k_dim), num_heads) for part in (q, k))
        S = g[t].exp()[:, None, None] * S
        u = beta[t][:, None] * (v.view(-1, v_dim) - torch.einsum("hvk,hk->hv", S, k))
        S = S + torch.einsum("hv,hk->hvk", u, k)
        o = torch.einsum("hvk,hk->hv", S, q * x.scale).to(dtype).to(work)

        normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + x.norm_eps)
        weighted = x.norm_weight * normed.to(dtype)
        z = x.z[t].to(work).view_as(weighted)
        out[t] = (weighted * (F.silu(z) if x.gate == "silu" else z.sigmoid())).to(dtype).flatten()
        if slot:
            x.conv_state[slot], x.state[slot] = window[1:], S
    return out


def _unit_heads(x: Tensor, num_heads: int) -> Tensor:
    """Scale rows [H, K] to unit length, and repeat each for its value heads."""
    unit = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    return unit.repeat_interleave(num_heads // len(x), dim=0)
