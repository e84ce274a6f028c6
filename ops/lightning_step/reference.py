"""The decode step as its definition: one sequence after the other, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def lightning_step_reference(
    qkv: Tensor,
    gate: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    slopes: Tensor,
    norm_weight: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    activation: str,
    scale: float,
    norm_groups: int,
    norm_eps: float,
) -> Tensor:
    """The oracle of the op: same arguments, any float dtype, the pool updated in place.

    It computes in float32, or in float64 when ``qkv`` is float64.
    """
    work = torch.promote_types(qkv.dtype, torch.float32)
    num_heads, dim, _ = state.shape[1:]
    decay = torch.exp(-slopes.to(work))[:, None, None]

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        return weight.to(work) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps)

    def rotate(x: Tensor, t: int) -> Tensor:
        if cos is None or sin is None:
            return x
        half = cos.shape[1]
        a, b, rest = x.split([half, half, dim - 2 * half], 1)
        c, s = cos[t].to(work), sin[t].to(work)
        return torch.cat([a * c - b * s, b * c + a * s, rest], 1)

    out_dtype = work if gate is None else qkv.dtype
    out = qkv.new_zeros(qkv.shape[0], num_heads * dim, dtype=out_dtype)
    offsets = cu_seqlens.tolist()
    slots = zip(initial_indices.tolist(), state_indices.tolist(), strict=True)
    for n, (initial, slot) in enumerate(slots):
        t = offsets[n]
        if offsets[n + 1] == t:
            continue
        x = qkv[t].to(work)
        x = (F.silu(x) if activation == "silu" else x).to(qkv.dtype).to(work)
        q, k, v = x.view(3, num_heads, dim)
        q, k = rotate(norm(q, q_norm_weight), t), rotate(norm(k, k_norm_weight), t)
        S = state[initial].to(work) if initial else torch.zeros_like(state[0], dtype=work)
        S = decay * S + v[:, :, None] * k[:, None, :]
        o = (scale * torch.einsum("hvk,hk->hv", S, q)).flatten()
        o = o if q_norm_weight is not None else o.to(qkv.dtype).to(work)
        if gate is not None and norm_weight is not None:
            groups = norm_weight.view(norm_groups, -1)
            o = norm(o.view(norm_groups, -1), groups).flatten() * gate[t].to(work).sigmoid()
        out[t] = o.to(out_dtype)
        if slot:
            state[slot] = S
    return out
