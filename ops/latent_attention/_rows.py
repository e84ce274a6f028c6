"""Rows of the pool written and gathered with torch's own indexing.

Shapes do not depend on indices, so that a CUDA graph can hold both: a padding token rewrites the
null row with what it holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.formats.fp8_kv import rounded, worth
from torch_hybrid.ops.latent_attention.validate import check_gathered_slots, check_new_slots


def store_latents(
    latent: Tensor,
    k_rope: Tensor,
    pool: Tensor,
    slot_mapping: Tensor,
    cu_seqlens: Tensor,
    *,
    pool_scale: Tensor | None = None,
) -> None:
    """Launcher of ``torch_hybrid::store_latents``."""
    num_tokens = slot_mapping.shape[0]
    if pool.device.type == "cpu":
        check_new_slots(slot_mapping, cu_seqlens, pool)
        num_tokens = int(cu_seqlens[-1])
    is_token = torch.arange(num_tokens, dtype=torch.int32, device=pool.device) < cu_seqlens[-1]
    slots = torch.where(is_token, slot_mapping[:num_tokens], 0).long()
    new_rows = torch.cat([latent[:num_tokens], k_rope[:num_tokens]], 1)
    if pool_scale is not None:  # torch's indexing does not know 8 bits
        new_rows, pool = rounded(new_rows, pool_scale).view(torch.uint8), pool.view(torch.uint8)
    null_row = pool[0, 0]
    pool.flatten(0, 1).index_copy_(0, slots, torch.where(is_token[:, None], new_rows, null_row))


def gather_latents(
    pool: Tensor,
    rows: Tensor,
    *,
    pool_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Launcher of ``torch_hybrid::gather_latents``."""
    if pool.device.type == "cpu":
        check_gathered_slots(rows, pool)
    if pool_scale is None:
        gathered = pool.flatten(0, 1).index_select(0, rows)
    else:
        numbers = pool.view(torch.uint8).flatten(0, 1).index_select(0, rows).view(pool.dtype)
        gathered = worth(numbers, pool_scale, dtype or torch.float32)
    return gathered.masked_fill_((rows == 0)[:, None], 0)
