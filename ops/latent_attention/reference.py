"""The oracle: one row written, one query attended, one row gathered at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.formats.fp8_kv import rounded, worth
from torch_hybrid.ops.latent_attention.op import GatherLatents, LatentAttention, StoreLatents


def latent_attention(x: LatentAttention) -> Tensor:
    """Compute the op's output; mutates ``x.pool``, as the op does."""
    q_latent, pool, pool_scale = x.q_latent, x.pool, x.pool_scale
    rank, page_size = q_latent.shape[2], pool.shape[1]
    work = torch.promote_types(q_latent.dtype, torch.float32)
    offsets, lengths = x.cu_seqlens.tolist(), x.seq_lens.tolist()
    out = q_latent.new_zeros(q_latent.shape)
    store_latents(x.stored())
    for n, length in enumerate(lengths):
        for t in range(offsets[n], offsets[n + 1]):
            visible = torch.arange(
                length - offsets[n + 1] + t + 1, dtype=torch.int64, device=pool.device
            )
            rows = pool[x.page_table[n, visible // page_size].long(), visible % page_size]
            rows = rows.to(work) if pool_scale is None else worth(rows, pool_scale, work)
            c, shared_key = rows.split([rank, rows.shape[1] - rank], 1)
            logits = x.scale * (q_latent[t].to(work) @ c.T + x.q_rope[t].to(work) @ shared_key.T)
            weights = torch.exp(logits - torch.logsumexp(logits, 1, keepdim=True))
            out[t] = (weights @ c).to(q_latent.dtype)
    return out


def store_latents(x: StoreLatents) -> None:
    """Write ``[latent[t] | k_rope[t]]`` into row ``slot_mapping[t]``."""
    for t in range(int(x.cu_seqlens[-1])):
        page, offset = divmod(int(x.slot_mapping[t]), x.pool.shape[1])
        row = torch.cat([x.latent[t], x.k_rope[t]])
        x.pool[page, offset] = row if x.pool_scale is None else rounded(row, x.pool_scale)


def gather_latents(x: GatherLatents) -> Tensor:
    """Copy row ``rows[i]`` of the pool into row i, or zeros for 0."""
    pool, pool_scale = x.pool, x.pool_scale
    out = pool.new_zeros(x.rows.shape[0], pool.shape[2], dtype=x.dtype or pool.dtype)
    for i, row in enumerate(x.rows.tolist()):
        if row:
            page, offset = divmod(row, pool.shape[1])
            held = pool[page, offset]
            out[i] = held if pool_scale is None else worth(held, pool_scale, out.dtype)
    return out
