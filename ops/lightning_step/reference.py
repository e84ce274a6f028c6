"""Both steps as their definition: one sequence and token after the other, in plain torch."""

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
    """The oracle of the decode step: same arguments, any float dtype, the pool updated in place.

    It computes in float32, or in float64 when ``qkv`` is float64.
    """
    num_seqs, (num_slots, *heads) = len(state_indices), state.shape
    return lightning_verify_reference(
        qkv,
        gate,
        q_norm_weight,
        k_norm_weight,
        cos,
        sin,
        slopes,
        norm_weight,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
        state.new_empty(num_slots, 0, 2 * heads[0] * heads[1]),
        state_indices.new_zeros(num_seqs),
        activation=activation,
        scale=scale,
        norm_groups=norm_groups,
        norm_eps=norm_eps,
    )


def lightning_verify_reference(
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
    records: Tensor,
    accepted: Tensor,
    *,
    activation: str,
    scale: float,
    norm_groups: int,
    norm_eps: float,
) -> Tensor:
    """The oracle of the step that verifies drafts, alike; records are updated in place too."""
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
        replayed = records[initial, : accepted[n]].to(work).unflatten(1, (2, num_heads, dim))
        tokens = range(offsets[n], offsets[n + 1])
        if not len(replayed) and not len(tokens):
            continue
        S = state[initial].to(work) if initial else torch.zeros_like(state[0], dtype=work)
        for k, v in replayed:
            S = decay * S + v[:, :, None] * k[:, None, :]
        left = S
        for t in tokens:
            x = qkv[t].to(work)
            x = (F.silu(x) if activation == "silu" else x).to(qkv.dtype).to(work)
            q, k, v = x.view(3, num_heads, dim)
            q, k = rotate(norm(q, q_norm_weight), t), rotate(norm(k, k_norm_weight), t)
            S = decay * S + v[:, :, None] * k[:, None, :]
            o = (scale * torch.einsum("hvk,hk->hv", S, q)).flatten()
            o = o if q_norm_weight is not None else o.to(qkv.dtype).to(work)
            if gate is not None and norm_weight is not None:
                groups = norm_weight.view(norm_groups, -1)
                o = norm(o.view(norm_groups, -1), groups).flatten() * gate[t].to(work).sigmoid()
            out[t] = o.to(out_dtype)
            if t == tokens.start:
                left = S
            elif slot:
                records[slot, t - tokens.start - 1] = torch.cat([k, v]).flatten()
        if slot:
            state[slot] = left
    return out
