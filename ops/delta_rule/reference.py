"""Delta rules as their definition: one token after the other, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.delta_rule.op import DeltaRule
from torch_hybrid.ops.delta_rule.unit_rows import l2_normalize


def delta_rule_reference(x: DeltaRule) -> Tensor:
    """Compute any of the ops in float32 or, where ``v`` is float64, in float64.

    ``state`` is updated in place.
    """
    compute = torch.promote_types(x.v.dtype, torch.float32)
    group = x.v.shape[1] // x.k.shape[1]
    q, k = (rows.to(compute).repeat_interleave(group, dim=1) for rows in (x.q, x.k))
    if x.qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    q = q * x.scale
    v, g, beta = (rows.to(compute) for rows in (x.v, x.g, x.beta))

    out = torch.zeros_like(x.v, memory_format=torch.contiguous_format)
    for tokens, initial, slot in x.each_sequence():
        S = x.state[initial].to(compute)
        if initial == 0:
            S = torch.zeros_like(S)
        for t in tokens:
            S, o = delta_rule_step(S, q[t], k[t], v[t], g[t], beta[t])
            out[t] = o
        if slot:
            x.state[slot] = S
    return out


def delta_rule_step(
    S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance the states ``S [H, V, K]`` by one token: decay, correct towards ``v``, read."""
    S = S * g.exp().view(len(S), 1, -1)  # a decay of each head, or of each of its channels
    u = beta[:, None] * (v - torch.einsum("hvk,hk->hv", S, k))
    S = S + torch.einsum("hv,hk->hvk", u, k)
    return S, torch.einsum("hvk,hk->hv", S, q)
