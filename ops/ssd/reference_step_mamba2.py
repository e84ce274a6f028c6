"""Definition of the decode step: one sequence after the other, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.ssd.op_step_mamba2 import SsdStep


def ssd_step_reference(x: SsdStep) -> Tensor:
    """Compute the op in float32, or in float64 when ``xBC`` is float64; pools are **mutated**."""
    dtype = x.xBC.dtype
    work = torch.promote_types(dtype, torch.float32)
    num_heads, v_dim, k_dim = x.state.shape[1:]
    group_size = (x.xBC.shape[1] - x.inner) // 2
    step = F.softplus(x.dt.to(work) + x.dt_bias.to(work)).clamp(x.dt_min, x.dt_max)
    decay = (-x.A_log.to(work).exp() * step).exp()

    def norm(y: Tensor) -> Tensor:
        assert x.norm_weight is not None
        parts = y.view(x.norm_groups, -1)
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + x.norm_eps)
        return parts.flatten() * x.norm_weight.to(work)

    out = x.xBC.new_zeros(x.xBC.shape[0], x.inner)
    for (t, *_), initial, slot in x.each_sequence():
        past = x.conv_state[initial] if initial else torch.zeros_like(x.conv_state[0])
        S = x.state[initial].to(work) if initial else torch.zeros_like(x.state[0], dtype=work)

        window = torch.cat([past, x.xBC[t : t + 1]])
        y = (window.to(work) * x.conv_weight.to(work).T).sum(0)
        y = y if x.conv_bias is None else y + x.conv_bias.to(work)
        y = (F.silu(y) if x.activation == "silu" else y).to(dtype).to(work)

        inputs, B, C = y.split([x.inner, group_size, group_size])
        B, C = (_of_heads(part.view(-1, k_dim), num_heads) for part in (B, C))
        inputs = inputs.view(num_heads, v_dim)
        S = decay[t][:, None, None] * S
        S = S + torch.einsum("hv,hk->hvk", step[t][:, None] * inputs, B)
        o = torch.einsum("hvk,hk->hv", S, C) + x.D.to(work)[:, None] * inputs
        y = o.flatten().to(dtype).to(work)

        if x.z is not None:
            gate = F.silu(x.z[t].to(work))
            if x.norm_weight is None:
                y = y * gate
            elif x.norm_before_gate:
                y = norm(y) * gate
            else:
                y = norm(y * gate)
        out[t] = y.to(dtype)
        if slot:
            x.conv_state[slot], x.state[slot] = window[1:], S
    return out


def _of_heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeat each of rows [G, K] for the heads of its group."""
    return x.repeat_interleave(num_heads // len(x), dim=0)
