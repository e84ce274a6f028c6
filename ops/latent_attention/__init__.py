"""Absorbed attention over paged latents (MLA), and the pool of latents it reads."""

from torch_hybrid.ops.latent_attention.op import (
    gather_latents,
    latent_attention,
    store_latents,
)

__all__ = ["gather_latents", "latent_attention", "store_latents"]
