"""The oracle: plain softmax attention, one query at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_hybrid.ops.formats.fp8_kv import rounded
from torch_hybrid.ops.paged_attention.op import Pages


def paged_attention_with_lse(x: Pages) -> tuple[Tensor, Tensor]:
    """Return the output and ``lse = log sum exp`` of the logits of each query and head.

    Mutates ``x.kv``, as the op does.
    """
    q, kv, window, softcap = x.q, x.kv, x.window, x.softcap
    kv_scales, relative_bias = x.kv_scales, x.relative_bias
    page_size, num_kv_heads = kv.shape[2:4]
    group = q.shape[1] // num_kv_heads
    work = torch.promote_types(q.dtype, torch.float32)
    offsets, lengths = x.cu_seqlens.tolist(), x.seq_lens.tolist()
    out = q.new_zeros(q.shape)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=work)

    for t in range(offsets[-1]):
        page, offset = divmod(int(x.slot_mapping[t]), page_size)
        rows = torch.stack([x.k[t], x.v[t]])
        kv[:, page, offset] = rows if kv_scales is None else rounded(rows, kv_scales[..., None])

    for n, length in enumerate(lengths):
        for t in range(offsets[n], offsets[n + 1]):
            position = length - offsets[n + 1] + t
            first = max(0, position - window + 1) if window else 0
            visible = torch.arange(first, position + 1, dtype=torch.int64, device=kv.device)
            pages = x.page_table[n, visible // page_size].long()
            shared = kv[:, pages, visible % page_size].to(work)  # [2, L visible, Hkv, D]
            if kv_scales is not None:
                shared *= kv_scales[:, None, :, None]
            keys, values = shared.repeat_interleave(group, dim=2)
            logits = x.scale * torch.einsum("lhd,hd->hl", keys, q[t].to(work))
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
