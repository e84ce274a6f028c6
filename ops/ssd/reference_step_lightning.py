"""Definition of the step: one sequence and token after the other, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.ssd.op_step_lightning import LightningStep


def lightning_step_reference(x: LightningStep) -> Tensor:
    """Compute the op in float32, or in float64 when ``qkv`` is float64.

    The pool, and records where there are some, are **mutated**.
    """
    work = torch.promote_types(x.qkv.dtype, torch.float32)
    num_heads, dim, _ = x.state.shape[1:]
    decay = torch.exp(-x.slopes.to(work))[:, None, None]
    num_seqs, num_slots = len(x.state_indices), len(x.state)
    records, accepted = x.records, x.accepted
    if records is None or accepted is None:
        records = x.state.new_empty(num_slots, 0, 2 * x.width)
        accepted = x.state_indices.new_zeros(num_seqs)

    def norm(y: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return y
        return weight.to(work) * y * torch.rsqrt(y.square().mean(-1, keepdim=True) + x.norm_eps)

    def rotate(y: Tensor, t: int) -> Tensor:
        if x.cos is None or x.sin is None:
            return y
        half = x.cos.shape[1]
        a, b, rest = y.split([half, half, dim - 2 * half], 1)
        c, s = x.cos[t].to(work), x.sin[t].to(work)
        return torch.cat([a * c - b * s, b * c + a * s, rest], 1)

    out_dtype = work if x.gate is None else x.qkv.dtype
    out = x.qkv.new_zeros(x.qkv.shape[0], num_heads * dim, dtype=out_dtype)
    offsets = x.cu_seqlens.tolist()
    slots = zip(x.initial_indices.tolist(), x.state_indices.tolist(), strict=True)
    for n, (initial, slot) in enumerate(slots):
        replayed = records[initial, : accepted[n]].to(work).unflatten(1, (2, num_heads, dim))
        tokens = range(offsets[n], offsets[n + 1])
        if not len(replayed) and not len(tokens):
            continue
        S = x.state[initial].to(work) if initial else torch.zeros_like(x.state[0], dtype=work)
        for k, v in replayed:
            S = decay * S + v[:, :, None] * k[:, None, :]
        left = S
        for t in tokens:
            y = x.qkv[t].to(work)
            y = (F.silu(y) if x.activation == "silu" else y).to(x.qkv.dtype).to(work)
            q, k, v = y.view(3, num_heads, dim)
            q, k = rotate(norm(q, x.q_norm_weight), t), rotate(norm(k, x.k_norm_weight), t)
            S = decay * S + v[:, :, None] * k[:, None, :]
            o = (x.scale * torch.einsum("hvk,hk->hv", S, q)).flatten()
            o = o if x.q_norm_weight is not None else o.to(x.qkv.dtype).to(work)
            if x.gate is not None and x.norm_weight is not None:
                groups = x.norm_weight.view(x.norm_groups, -1)
                o = norm(o.view(x.norm_groups, -1), groups).flatten() * x.gate[t].to(work).sigmoid()
            out[t] = o.to(out_dtype)
            if t == tokens.start:
                left = S
            elif slot:
                records[slot, t - tokens.start - 1] = torch.cat([k, v]).flatten()
        if slot:
            x.state[slot] = left
    return out
