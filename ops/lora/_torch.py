"""Implementation "torch": each adapter's products for all rows, of which those of others are left
out."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.lora.op import Lora


def lora(x: Lora) -> Tensor:
    """Launch ``torch_hybrid::lora``."""
    num_slots, num_parts, most, _ = x.a.shape
    work = torch.promote_types(x.base.dtype, torch.float32)
    rows, total = x.x.to(work), x.base.to(work)
    columns = torch.arange(x.base.shape[1], dtype=torch.int32, device=x.base.device)
    rank = torch.arange(most, dtype=torch.int32, device=x.base.device)
    is_changed = torch.zeros_like(total, dtype=torch.bool)
    for slot in range(num_slots):
        is_of_slot = (x.slots == slot + 1)[:, None]
        for part in range(num_parts):
            is_used = (rank < x.ranks[slot, part])[:, None]
            a = torch.where(is_used, x.a[slot, part].to(work), 0.0)
            b = torch.where(is_used, x.b[slot].to(work), 0.0)
            is_in_part = (columns >= x.starts[part]) & (columns < x.starts[part + 1])
            is_own = is_of_slot & is_in_part & is_used.any()
            total = torch.where(is_own, total + rows @ a.T @ b, total)
            is_changed |= is_own
    return torch.where(is_changed, total.to(x.base.dtype), x.base)
