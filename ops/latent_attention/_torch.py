"""Implementation "torch": one sequence at a time, all heads in two products."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_hybrid.ops.formats.fp8_kv import worth
from torch_hybrid.ops.latent_attention._rows import store_latents
from torch_hybrid.ops.latent_attention.op import LatentAttention

# Queries per product: bounds the logits to [H * _BLOCK, seq_len].
_BLOCK = 64


def latent_attention(x: LatentAttention) -> Tensor:
    """Launch ``torch_hybrid::latent_attention``."""
    store_latents(x.stored())
    q_latent, pool, pool_scale, page_size = x.q_latent, x.pool, x.pool_scale, x.pool.shape[1]
    q = torch.cat([q_latent, x.q_rope], 2)
    offsets, lengths = x.cu_seqlens.tolist(), x.seq_lens.tolist()
    out = torch.zeros(q_latent.shape, dtype=q.dtype, device=q.device)
    for n, length in enumerate(lengths):
        if offsets[n] == offsets[n + 1]:
            continue
        pages = x.page_table[n, : -(-length // page_size)].long()
        held = pool[pages].flatten(0, 1)[:length]
        wide = torch.promote_types(q.dtype, torch.float32)
        rows = held.to(wide) if pool_scale is None else worth(held, pool_scale, wide)
        for begin in range(offsets[n], offsets[n + 1], _BLOCK):
            end = min(begin + _BLOCK, offsets[n + 1])
            visible = rows[: length - offsets[n + 1] + end]
            out[begin:end] = _attend(q[begin:end], visible, q_latent.shape[2], x.scale)
    return out


def _attend(q: Tensor, rows: Tensor, rank: int, scale: float) -> Tensor:
    """Attend from the last queries to all rows, causal among the last rows."""
    num_tokens, num_heads, _ = q.shape
    logits = scale * (q.to(rows.dtype).flatten(0, 1) @ rows.T).view(num_tokens, num_heads, -1)
    hidden = torch.ones(num_tokens, rows.shape[0], dtype=torch.bool, device=q.device)
    hidden = hidden.triu(rows.shape[0] - num_tokens + 1)
    logits.masked_fill_(hidden[:, None], -math.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse[..., None])
    out = (weights.flatten(0, 1) @ rows[:, :rank]).view(num_tokens, num_heads, rank)
    return out.to(q.dtype)
