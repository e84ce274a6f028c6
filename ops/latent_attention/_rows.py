"""Rows of the pool written and gathered with torch's own indexing.

Shapes do not depend on indices, so that a CUDA graph can hold both: a padding token rewrites the
null row with what it holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.formats.fp8_kv import rounded, worth
from torch_hybrid.ops.latent_attention.op import GatherLatents, StoreLatents


def store_latents(x: StoreLatents) -> None:
    """Launch ``torch_hybrid::store_latents``."""
    pool, cu_seqlens, num_tokens = x.pool, x.cu_seqlens, x.slot_mapping.shape[0]
    if pool.device.type == "cpu":
        num_tokens = int(cu_seqlens[-1])
    is_token = torch.arange(num_tokens, dtype=torch.int32, device=pool.device) < cu_seqlens[-1]
    slots = torch.where(is_token, x.slot_mapping[:num_tokens], 0).long()
    new_rows = torch.cat([x.latent[:num_tokens], x.k_rope[:num_tokens]], 1)
    if x.pool_scale is not None:  # torch's indexing does not know 8 bits
        new_rows, pool = rounded(new_rows, x.pool_scale).view(torch.uint8), pool.view(torch.uint8)
    null_row = pool[0, 0]
    pool.flatten(0, 1).index_copy_(0, slots, torch.where(is_token[:, None], new_rows, null_row))


def gather_latents(x: GatherLatents) -> Tensor:
    """Launch ``torch_hybrid::gather_latents``."""
    pool, rows = x.pool, x.rows
    if x.pool_scale is None:
        gathered = pool.flatten(0, 1).index_select(0, rows)
    else:
        numbers = pool.view(torch.uint8).flatten(0, 1).index_select(0, rows).view(pool.dtype)
        gathered = worth(numbers, x.pool_scale, x.dtype or torch.float32)
    return gathered.masked_fill_((rows == 0)[:, None], 0)
