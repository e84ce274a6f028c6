"""Gates and norms that end a mixer of a scalar decay, in float32 with one rounding.

``mean_of`` averages means of squares over ranks that share a group of channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def alone(means: Tensor) -> Tensor:
    """Return the means of channels that this rank has to itself."""
    return means


def norm(
    x: Tensor, weight: Tensor, eps: float, mean_of: Callable[[Tensor], Tensor] = alone
) -> Tensor:
    """Normalise the last axis (RMSNorm) in float32."""
    x32 = x.float()
    means = mean_of(x32.pow(2).mean(-1, keepdim=True))
    return weight.float() * (x32 * torch.rsqrt(means + eps))


def norm_and_gate(
    o: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    num_groups: int,
    eps: float,
    mean_of: Callable[[Tensor], Tensor] = alone,
) -> Tensor:
    """Normalise each group of channels of o [T, C], then gate it, as lightning attention does."""
    groups = o.unflatten(-1, (num_groups, -1))
    normed = norm(groups, weight.unflatten(0, (num_groups, -1)), eps, mean_of).flatten(1)
    return (normed * gate.float().sigmoid()).to(gate.dtype)


def gate_with_norm(
    o: Tensor,
    z: Tensor,
    weight: Tensor | None,
    *,
    norm_before_gate: bool,
    num_groups: int,
    eps: float,
    mean_of: Callable[[Tensor], Tensor] = alone,
) -> Tensor:
    """Gate o [T, C] by z before the norm, after it, or without one, as Mamba2 does."""

    def normed(y: Tensor) -> Tensor:
        assert weight is not None
        groups: Tensor = y.unflatten(-1, (num_groups, -1))
        means = mean_of(groups.pow(2).mean(-1, keepdim=True))
        return weight.float() * (groups * torch.rsqrt(means + eps)).flatten(-2)

    gate, gated = F.silu(z.float()), o.float()
    if weight is None:
        gated = gated * gate
    elif norm_before_gate:
        gated = normed(gated) * gate
    else:
        gated = normed(gated * gate)
    return gated.to(o.dtype)
