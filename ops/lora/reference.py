"""Adapters of rows as their definition, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.lora.op import Lora


def lora(x: Lora) -> Tensor:
    """Compute the op row by row and part by part, in float32 or wider."""
    work = torch.promote_types(x.base.dtype, torch.float32)
    out = x.base.clone()
    parts = list(zip(x.starts[:-1].tolist(), x.starts[1:].tolist(), strict=True))
    for t, slot in enumerate(x.slots.tolist()):
        for p, (first, last) in enumerate(parts if slot else ()):
            rank = int(x.ranks[slot - 1, p])
            inner = x.a[slot - 1, p, :rank].to(work) @ x.x[t].to(work)
            added = inner @ x.b[slot - 1, :rank, first:last].to(work)
            if rank:
                out[t, first:last] = (x.base[t, first:last].to(work) + added).to(out.dtype)
    return out
