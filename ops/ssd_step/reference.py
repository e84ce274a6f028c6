"""The decode step as its definition: one sequence after the other, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def ssd_step_reference(
    xBC: Tensor,
    z: Tensor | None,
    dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    D: Tensor,
    norm_weight: Tensor | None,
    conv_state: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    activation: str,
    dt_min: float,
    dt_max: float,
    norm_before_gate: bool,
    norm_groups: int,
    norm_eps: float,
) -> Tensor:
    """The oracle of the op: same arguments, any float dtype, both pools updated in place.

    It computes in float32, or in float64 when ``xBC`` is float64.
    """
    dtype = xBC.dtype
    work = torch.promote_types(dtype, torch.float32)
    num_heads, v_dim, k_dim = state.shape[1:]
    x_size = num_heads * v_dim
    group_size = (xBC.shape[1] - x_size) // 2
    step = F.softplus(dt.to(work) + dt_bias.to(work)).clamp(dt_min, dt_max)
    decay = (-A_log.to(work).exp() * step).exp()

    def norm(y: Tensor) -> Tensor:
        assert norm_weight is not None
        parts = y.view(norm_groups, -1)
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + norm_eps)
        return parts.flatten() * norm_weight.to(work)

    out = xBC.new_zeros(xBC.shape[0], x_size)
    offsets = cu_seqlens.tolist()
    slots = zip(initial_indices.tolist(), state_indices.tolist(), strict=True)
    for n, (initial, slot) in enumerate(slots):
        t = offsets[n]
        if offsets[n + 1] == t:
            continue
        past = conv_state[initial] if initial else torch.zeros_like(conv_state[0])
        S = state[initial].to(work) if initial else torch.zeros_like(state[0], dtype=work)

        window = torch.cat([past, xBC[t : t + 1]])
        y = (window.to(work) * conv_weight.to(work).T).sum(0)
        y = y if conv_bias is None else y + conv_bias.to(work)
        y = (F.silu(y) if activation == "silu" else y).to(dtype).to(work)

        x, B, C = y.split([x_size, group_size, group_size])
        B, C = (_of_heads(part.view(-1, k_dim), num_heads) for part in (B, C))
        x = x.view(num_heads, v_dim)
        S = decay[t][:, None, None] * S
        S = S + torch.einsum("hv,hk->hvk", step[t][:, None] * x, B)
        o = torch.einsum("hvk,hk->hv", S, C) + D.to(work)[:, None] * x
        y = o.flatten().to(dtype).to(work)

        if z is not None:
            gate = F.silu(z[t].to(work))
            if norm_weight is None:
                y = y * gate
            elif norm_before_gate:
                y = norm(y) * gate
            else:
                y = norm(y * gate)
        out[t] = y.to(dtype)
        if slot:
            conv_state[slot], state[slot] = window[1:], S
    return out


def _of_heads(x: Tensor, num_heads: int) -> Tensor:
    """Rows [G, K], each repeated for the heads of its group."""
    return x.repeat_interleave(num_heads // len(x), dim=0)
