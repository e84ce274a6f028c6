"""Linear attention with a scalar decay as its definition: one token after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.ssd.op import Ssd


def ssd_reference(x: Ssd) -> Tensor:
    """Compute both ops one token at a time, in float32 or, where ``v`` is float64, in float64."""
    k, v, g, state = x.k, x.v, x.g, x.state
    compute = torch.promote_types(v.dtype, torch.float32)
    dt = torch.ones_like(g) if x.dt is None else x.dt
    D = g.new_zeros(g.shape[1]) if x.D is None else x.D
    group = v.shape[1] // k.shape[1]
    q, k = (y.to(compute).repeat_interleave(group, dim=1) for y in (x.q, k))
    g, dt, D = (y.to(compute) for y in (g, dt, D))

    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    for tokens, initial, slot in x.each_sequence():
        S = state[initial].to(compute) if initial else _zero_state(k, v, compute)
        for t in tokens:
            v_t = v[t].to(compute)
            S, o = ssd_step(S, x.scale * q[t], k[t], v_t, g[t], dt[t])
            out[t] = o + D[:, None] * v_t
        if slot:
            state[slot] = S
    return out


def ssd_step(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, dt: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance the states ``S [H, V, K]`` by one token: decay, add the token, read."""
    S = g.exp()[:, None, None] * S + torch.einsum("hv,hk->hvk", dt[:, None] * v, k)
    return S, torch.einsum("hvk,hk->hv", S, q)


def _zero_state(k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(v.shape[1], v.shape[2], k.shape[2], dtype=dtype, device=v.device)
