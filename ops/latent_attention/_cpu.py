"""Implementations "cpp" of the copies of rows, by _cpu.cpp: FP8 is rounded before and widened
after."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torch_hybrid.ops.formats.fp8_kv import rounded, worth
from torch_hybrid.ops.implementations import in_cpp
from torch_hybrid.ops.latent_attention.op import GatherLatents, StoreLatents

_STORE = in_cpp("torch_hybrid.ops.latent_attention._cpu.cpp:store_latents")
_GATHER = in_cpp("torch_hybrid.ops.latent_attention._cpu.cpp:gather_latents")


def store_latents(x: StoreLatents) -> None:
    """Launch ``torch_hybrid::store_latents``."""
    if x.pool_scale is not None:
        latent, k_rope = rounded(x.latent, x.pool_scale), rounded(x.k_rope, x.pool_scale)
        x = replace(x, latent=latent, k_rope=k_rope)
    _STORE.load()(x)


def gather_latents(x: GatherLatents) -> Tensor:
    """Launch ``torch_hybrid::gather_latents``."""
    held: Tensor = _GATHER.load()(replace(x, dtype=None))
    return held if x.pool_scale is None else worth(held, x.pool_scale, x.dtype or torch.float32)
