"""The oracle: plain softmax attention, one query at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_hybrid.ops.ragged_attention.op import RaggedAttentionWithLse


def ragged_attention_with_lse(x: RaggedAttentionWithLse) -> tuple[Tensor, Tensor]:
    """Return ``softmax(scale * q k^T) v`` and ``log sum exp`` of the logits over visible keys."""
    q, k, v = x.q, x.k, x.v
    group = q.shape[1] // k.shape[1]
    work = torch.promote_types(q.dtype, torch.float32)
    offsets_q, offsets_k = x.cu_seqlens_q.tolist(), x.cu_seqlens_k.tolist()
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    lse = q.new_full(q.shape[:2], -math.inf, dtype=work)
    for n in range(len(offsets_q) - 1):
        begin, end = offsets_k[n], offsets_k[n + 1]
        for t in range(offsets_q[n], offsets_q[n + 1]):
            last = end - offsets_q[n + 1] + t + 1 if x.causal else end
            if last <= begin:
                continue
            keys, values = (
                rows[begin:last].to(work).repeat_interleave(group, dim=1) for rows in (k, v)
            )
            logits = x.scale * torch.einsum("lhd,hd->hl", keys, q[t].to(work))
            lse[t] = torch.logsumexp(logits, 1)
            weights = torch.exp(logits - lse[t, :, None])
            out[t] = torch.einsum("hl,lhd->hd", weights, values).to(q.dtype)
    return out, lse
