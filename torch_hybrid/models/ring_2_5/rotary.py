"""Rotary frequencies of Ring-2.5: plain, or stretched by YaRN (arXiv 2309.00071)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.layers.rotary import Rotary, mscale, rope_type


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec:
    """Rotated dims of a head, their base frequency, and the parameters of YaRN or None."""

    dim: int
    theta: float
    scaling: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        kind = rope_type(self.scaling)
        if kind not in ("default", "yarn"):
            raise UnsupportedError(
                f"rope_scaling must be of type 'default' or 'yarn', got {kind!r}"
            )


class RotaryTable(nn.Module):
    """Cosines and sines of positions.

    Args:
        spec: the frequencies.
    """

    inv_freq: Tensor

    def __init__(self, spec: RotarySpec) -> None:
        super().__init__()
        freqs = _frequencies(spec, torch.device("cpu"))
        self.register_buffer("inv_freq", freqs, persistent=False)
        self.amplitude = _amplitude(spec)

    def forward(self, positions: Tensor) -> Rotary:
        """Make the rotary table of positions [T] int64."""
        return _rotary(positions, self.inv_freq, self.amplitude)


def rotary_of(spec: RotarySpec, positions: Tensor) -> Rotary:
    """Make the rotary table of positions [T] int64, with frequencies computed on their device."""
    return _rotary(positions, _frequencies(spec, positions.device), _amplitude(spec))


def _rotary(positions: Tensor, inv_freq: Tensor, amplitude: float) -> Rotary:
    angles = positions[:, None].float() * inv_freq
    return Rotary(angles.cos() * amplitude, angles.sin() * amplitude)


def _frequencies(spec: RotarySpec, device: torch.device) -> Tensor:
    """Compute frequencies [R / 2] float32."""
    is_plain = rope_type(spec.scaling) == "default"
    return (_plain(spec, device) if is_plain else _yarn(spec, device)).float()


def _plain(spec: RotarySpec, device: torch.device) -> Tensor:
    """Compute plain frequencies, [R / 2] float64: ``theta^(-2 i / R)``."""
    dims = torch.arange(0, spec.dim, 2, dtype=torch.float64, device=device)
    return spec.theta ** -(dims / max(spec.dim, 1))


def _yarn(spec: RotarySpec, device: torch.device) -> Tensor:
    """Compute YaRN's frequencies: slow dims are divided by the factor, middle ones blended."""
    scaling = spec.scaling or {}
    length = scaling["original_max_position_embeddings"]

    def dim_of(rotations: float) -> float:
        """Find the dim that makes this many rotations over the original length."""
        turns = math.log(length / (rotations * 2 * math.pi))
        return spec.dim * turns / (2 * math.log(spec.theta))

    low = max(math.floor(dim_of(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(dim_of(scaling.get("beta_slow", 1))), spec.dim - 1)
    pairs = torch.arange(spec.dim // 2, dtype=torch.float64, device=device)
    ramp = (pairs - low) / max(high - low, 1e-3)
    slowed, factor = ramp.clamp(0, 1), float(scaling["factor"])
    return _plain(spec, device) * ((1 - slowed) + slowed / factor)


def _amplitude(spec: RotarySpec) -> float:
    """Compute the factor on cosines and sines, which YaRN has."""
    scaling = spec.scaling or {}
    if rope_type(scaling) == "default":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling, "mscale") / mscale(scaling, "mscale_all_dim")
    return mscale({**scaling, "mscale": 1.0}, "mscale")
