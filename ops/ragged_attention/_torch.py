"""Implementation "torch": one sequence at a time, all heads in two batched products."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_hybrid.ops.ragged_attention.op import RaggedAttentionWithLse

# Queries per product: bounds the logits to [H, _BLOCK, keys of a sequence].
_BLOCK = 128


def ragged_attention_with_lse(x: RaggedAttentionWithLse) -> tuple[Tensor, Tensor]:
    """Launch ``torch_hybrid::ragged_attention_with_lse``."""
    q, k, v, causal = x.q, x.k, x.v, x.causal
    offsets_q, offsets_k = x.cu_seqlens_q.tolist(), x.cu_seqlens_k.tolist()
    work = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    for n in range(len(offsets_q) - 1):
        own = slice(offsets_k[n], offsets_k[n + 1])
        if own.start == own.stop:
            continue
        keys, values = (rows[own].to(work).transpose(0, 1) for rows in (k, v))
        for begin in range(offsets_q[n], offsets_q[n + 1], _BLOCK):
            end = min(begin + _BLOCK, offsets_q[n + 1])
            # Keys that the block's last query sees; none of them for its first queries, perhaps.
            count = keys.shape[1] - (offsets_q[n + 1] - end if causal else 0)
            if count > 0:
                out[begin:end], lse[begin:end] = _attend(
                    q[begin:end].to(work), keys[:, :count], values[:, :count], causal, x.scale
                )
    return out, lse


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend with [n, H, D] to [Hk, m, D]; if causal, the last query sees all keys."""
    num_tokens, num_heads, _ = q.shape
    num_k_heads, num_keys, _ = keys.shape
    folded = q.unflatten(1, (num_k_heads, -1)).permute(1, 2, 0, 3)
    logits = scale * (folded.flatten(1, 2) @ keys.transpose(1, 2))
    logits = logits.unflatten(1, (-1, num_tokens))
    if causal:
        hidden = torch.ones(num_tokens, num_keys, dtype=torch.bool, device=q.device)
        logits.masked_fill_(hidden.triu(num_keys - num_tokens + 1), -math.inf)
    lse = torch.logsumexp(logits, -1)
    # A row without keys has lse -inf; its weights would be NaN.
    weights = torch.exp(logits - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None])
    out = (weights.flatten(1, 2) @ values).unflatten(1, (-1, num_tokens))
    return (
        out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, -1),
        lse.permute(2, 0, 1).reshape(num_tokens, num_heads),
    )
