"""Rotary position embedding for mixers that rotate their own queries and keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """Cosines and sines [T, R / 2] float32, by which a head's first R dims are rotated."""

    cos: Tensor
    sin: Tensor


def rotate_halves(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate x [T, H, D]: dim i of the first R with dim i + R / 2 (NeoX)."""
    half = rotary.cos.shape[-1]
    cos, sin = (table[:, None].to(x.dtype) for table in rotary)
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
