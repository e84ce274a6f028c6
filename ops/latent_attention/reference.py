"""The oracle: one row written, one query attended, one row gathered at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_hybrid.ops.formats.fp8_kv import rounded, worth


def latent_attention_with_lse(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    pool: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    scale: float,
    pool_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output and ``lse = log sum exp`` of the logits of each query and head."""
    rank, page_size = q_latent.shape[2], pool.shape[1]
    work = torch.promote_types(q_latent.dtype, torch.float32)
    offsets, lengths = cu_seqlens.tolist(), seq_lens.tolist()
    out = q_latent.new_zeros(q_latent.shape)
    lse = q_latent.new_full(q_latent.shape[:2], -math.inf, dtype=work)
    store_latents(latent, k_rope, pool, slot_mapping, cu_seqlens, pool_scale=pool_scale)
    for n, length in enumerate(lengths):
        for t in range(offsets[n], offsets[n + 1]):
            visible = torch.arange(
                length - offsets[n + 1] + t + 1, dtype=torch.int64, device=pool.device
            )
            rows = pool[page_table[n, visible // page_size].long(), visible % page_size]
            rows = rows.to(work) if pool_scale is None else worth(rows, pool_scale, work)
            c, shared_key = rows.split([rank, rows.shape[1] - rank], 1)
            logits = scale * (q_latent[t].to(work) @ c.T + q_rope[t].to(work) @ shared_key.T)
            lse[t] = torch.logsumexp(logits, 1)
            out[t] = (torch.exp(logits - lse[t, :, None]) @ c).to(q_latent.dtype)
    return out, lse


def store_latents(
    latent: Tensor,
    k_rope: Tensor,
    pool: Tensor,
    slot_mapping: Tensor,
    cu_seqlens: Tensor,
    *,
    pool_scale: Tensor | None = None,
) -> None:
    """Row ``slot_mapping[t]`` becomes ``[latent[t] | k_rope[t]]``."""
    for t in range(int(cu_seqlens[-1])):
        page, offset = divmod(int(slot_mapping[t]), pool.shape[1])
        row = torch.cat([latent[t], k_rope[t]])
        pool[page, offset] = row if pool_scale is None else rounded(row, pool_scale)


def gather_latents(
    pool: Tensor,
    rows: Tensor,
    *,
    pool_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Row i is row ``rows[i]`` of the pool, or zeros for 0."""
    out = pool.new_zeros(rows.shape[0], pool.shape[2], dtype=dtype or pool.dtype)
    for i, row in enumerate(rows.tolist()):
        if row:
            page, offset = divmod(row, pool.shape[1])
            held = pool[page, offset]
            out[i] = held if pool_scale is None else worth(held, pool_scale, out.dtype)
    return out
