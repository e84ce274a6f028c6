"""Definition of the decode step: one sequence after the other, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.delta_rule.op_step_kimi import KimiDeltaStep
from torch_hybrid.ops.delta_rule.unit_rows import l2_normalize


def kimi_delta_step_reference(x: KimiDeltaStep) -> Tensor:
    """Compute the op in float32, or in float64 when ``qkv`` is float64; pools are **mutated**."""
    dtype = x.qkv.dtype
    work = torch.promote_types(dtype, torch.float32)
    num_heads, v_dim, k_dim = x.state.shape[1:]
    rate = x.A_log.to(work).exp()[:, None]
    step = x.a.to(work).unflatten(1, (num_heads, k_dim)) + x.dt_bias.to(work)
    if x.gate_lower_bound is None:
        g = -rate * F.softplus(step)
    else:
        g = x.gate_lower_bound * torch.sigmoid(rate * step)
    beta = x.b.to(work).sigmoid()

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

        q, k, v = (part.view(num_heads, -1) for part in y.split(x.widths))
        q, k = l2_normalize(q), l2_normalize(k)
        S = S * g[t].exp()[:, None, :]
        u = beta[t][:, None] * (v - torch.einsum("hvk,hk->hv", S, k))
        S = S + torch.einsum("hv,hk->hvk", u, k)
        o = torch.einsum("hvk,hk->hv", S, q * x.scale).to(dtype).to(work)

        normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + x.norm_eps)
        gate = x.z[t].to(work).sigmoid().view(num_heads, v_dim)
        out[t] = (x.norm_weight.to(work) * normed * gate).to(dtype).flatten()
        if slot:
            x.conv_state[slot], x.state[slot] = window[1:], S
    return out
