"""Kimi delta attention as its definition: one token after the other, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.delta_rule._torch import l2_normalize


def kimi_delta_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    scale: float,
    qk_l2norm: bool,
) -> Tensor:
    """The oracle of both ops: same arguments, any float dtype, ``state`` updated in place.

    It computes in float32, or in float64 when ``v`` is float64.
    """
    compute = torch.promote_types(v.dtype, torch.float32)
    q, k = q.to(compute), k.to(compute)
    if qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    q = q * scale

    out = torch.zeros_like(v, memory_format=torch.contiguous_format)
    offsets = cu_seqlens.tolist()
    slots = zip(initial_indices.tolist(), state_indices.tolist(), strict=True)
    for n, (initial, slot) in enumerate(slots):
        if offsets[n] == offsets[n + 1]:
            continue
        S = state[initial].to(compute)
        if initial == 0:
            S = torch.zeros_like(S)
        for t in range(offsets[n], offsets[n + 1]):
            S, o = delta_attention_step(
                S, q[t], k[t], v[t].to(compute), g[t].to(compute), beta[t].to(compute)
            )
            out[t] = o
        if slot:
            state[slot] = S
    return out


def delta_attention_step(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance the states ``S [H, V, K]`` by one token: decay, correct towards ``v``, read."""
    S = S * g.exp()[:, None, :]
    u = beta[:, None] * (v - torch.einsum("hvk,hk->hv", S, k))
    S = S + torch.einsum("hv,hk->hvk", u, k)
    return S, torch.einsum("hvk,hk->hv", S, q)
