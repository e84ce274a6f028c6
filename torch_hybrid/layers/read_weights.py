"""Linear layers whose weights other layers read, instead of calling the layers."""

from __future__ import annotations

from torch import nn

from torch_hybrid.layers.indexed_latent_attention import IndexedLatentAttention
from torch_hybrid.layers.latent_attention import LatentAttention


def read_by_weight(model: nn.Module) -> set[nn.Module]:
    """Find the layers that must keep float weights: latent attention splits ``kv_b_proj`` by
    heads."""
    latent = (LatentAttention, IndexedLatentAttention)
    return {module.kv_b_proj for module in model.modules() if isinstance(module, latent)}
