"""Kimi-K3, its text part: Kimi delta attention of bounded decay, gated MLA, experts of a latent,
and residuals picked from those of earlier blocks; transformers has no class for it."""

from torch_hybrid.models.families.kimi_k3.family import KimiK3Family

__all__ = ["KimiK3Family"]
