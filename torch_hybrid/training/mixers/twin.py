"""A base of mixers that train.

A twin is a class in front of a mixer's own. With a packing it computes by
``torch_hybrid.functional``; else the mixer's own forward runs, with caches of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_hybrid.packing import Packing

Submodule = Callable[..., Tensor]


class Twin(nn.Module):
    """Mixer whose subclasses know what their families compute."""

    def forward(
        self, hidden_states: Tensor, *args: Any, packing: Packing | None = None, **options: Any
    ) -> Tensor:
        """Map [B, T, D] to [B, T, D]; ``packing`` is that of all B * T tokens."""
        if packing is None:
            own: Tensor = super().forward(hidden_states, *args, **options)
            return own
        return self.packed(hidden_states.flatten(0, 1), packing).view(hidden_states.shape)

    def packed(self, x: Tensor, packing: Packing) -> Tensor:
        """Map tokens [T, D] to [T, D]."""
        raise NotImplementedError


def by_head(x: Tensor, head_dim: int) -> Tensor:
    """Split the last axis into heads."""
    return x.view(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)


def work_dtype(x: Tensor) -> torch.dtype:
    """Name the dtype of sums: float32, of float64 float64."""
    return torch.promote_types(x.dtype, torch.float32)


def as_work(x: Tensor) -> Tensor:
    """Convert to the dtype of sums."""
    return x.to(work_dtype(x))
