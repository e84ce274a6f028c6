"""Implementation "torch": a stable sort, on any device."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.top_k.op import TopK


def top_k(x: TopK) -> tuple[Tensor, Tensor]:
    """Launch ``torch_hybrid::top_k``."""
    values, places = x.x.sort(dim=-1, descending=True, stable=True)
    return values[..., : x.k].contiguous(), places[..., : x.k].contiguous()
