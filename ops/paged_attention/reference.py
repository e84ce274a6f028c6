"""The oracle: plain softmax attention, one query at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_hybrid.ops.formats.fp8_kv import rounded


def paged_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    kv_scales: Tensor | None = None,
    relative_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output and ``lse = log sum exp`` of the logits of each query and head."""
    page_size, num_kv_heads = kv.shape[2:4]
    group = q.shape[1] // num_kv_heads
    work = torch.promote_types(q.dtype, torch.float32)
    offsets, lengths = cu_seqlens.tolist(), seq_lens.tolist()
    out = q.new_zeros(q.shape)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=work)

    for t in range(offsets[-1]):
        page, offset = divmod(int(slot_mapping[t]), page_size)
        rows = torch.stack([k[t], v[t]])
        kv[:, page, offset] = rows if kv_scales is None else rounded(rows, kv_scales[..., None])

    for n, length in enumerate(lengths):
        for t in range(offsets[n], offsets[n + 1]):
            position = length - offsets[n + 1] + t
            first = max(0, position - window + 1) if window else 0
            visible = torch.arange(first, position + 1, dtype=torch.int64, device=kv.device)
            pages = page_table[n, visible // page_size].long()
            shared = kv[:, pages, visible % page_size].to(work)  # [2, L visible, Hkv, D]
            if kv_scales is not None:
                shared *= kv_scales[:, None, :, None]
            keys, values = shared.repeat_interleave(group, dim=2)
            logits = scale * torch.einsum("lhd,hd->hl", keys, q[t].to(work))
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            if relative_bias is not None:
                distance = position - visible
                near = distance < relative_bias.shape[2]
                logits[:, near] += relative_bias[t][:, distance[near]].to(work)
            lse[t] = torch.logsumexp(logits, 1)
            weights = torch.exp(logits - lse[t, :, None])
            out[t] = torch.einsum("hl,lhd->hd", weights, values).to(q.dtype)
    return out, lse
