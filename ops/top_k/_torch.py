"""Implementation "torch": a stable sort, on any device."""

from __future__ import annotations

from torch import Tensor


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Launcher of ``torch_hybrid::top_k``."""
    values, places = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :k].contiguous(), places[..., :k].contiguous()
