"""Linear attention with a scalar decay as its definition: one token after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def ssd_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor | None,
    D: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    scale: float,
) -> Tensor:
    """The oracle of both ops: same arguments, any float dtype, ``state`` updated in place.

    It computes in float32, or in float64 when ``v`` is float64.
    """
    compute = torch.promote_types(v.dtype, torch.float32)
    dt = torch.ones_like(g) if dt is None else dt
    D = g.new_zeros(g.shape[1]) if D is None else D
    group = v.shape[1] // k.shape[1]
    q, k = (x.to(compute).repeat_interleave(group, dim=1) for x in (q, k))
    g, dt, D = (x.to(compute) for x in (g, dt, D))

    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    offsets = cu_seqlens.tolist()
    slots = zip(initial_indices.tolist(), state_indices.tolist(), strict=True)
    for n, (initial, slot) in enumerate(slots):
        if offsets[n] == offsets[n + 1]:
            continue
        S = state[initial].to(compute) if initial else _zero_state(k, v, compute)
        for t in range(offsets[n], offsets[n + 1]):
            v_t = v[t].to(compute)
            S, o = ssd_step(S, scale * q[t], k[t], v_t, g[t], dt[t])
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
