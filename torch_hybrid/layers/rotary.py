"""Rotary position embedding for mixers that rotate their own queries and keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """Cosines and sines [T, R / 2] float32, by which a head's first R dims are rotated."""

    cos: Tensor
    sin: Tensor


def rotate_halves(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate x [T, H, D]: dim i of the first R with dim i + R / 2 (NeoX)."""
    half = rotary.cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([*_rotate(a, b, rotary), rest], dim=-1)


def rotate_pairs(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate x [T, H, R]: dim 2 i with dim 2 i + 1 (GPT-J).

    The result has all even dims first. Its order does not matter as long as queries and keys share
    it.
    """
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat(_rotate(a, b, rotary), dim=-1)


def _rotate(a: Tensor, b: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    cos, sin = (table[:, None].to(a.dtype) for table in rotary)
    return a * cos - b * sin, b * cos + a * sin


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """Look up the kind of scaling, under its new name or its old one."""
    given = scaling or {}
    return str(given.get("rope_type", given.get("type", "default")))


def mscale(scaling: Mapping[str, Any] | None, field: str) -> float:
    """Compute YaRN's attention scale for ``field``; 1 if that is not set."""
    if rope_type(scaling) == "default" or not scaling or not scaling.get(field):
        return 1.0
    factor: float = scaling.get("factor", 1.0)
    return 0.1 * scaling[field] * math.log(factor) + 1.0 if factor > 1 else 1.0
