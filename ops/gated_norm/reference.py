"""Mathematics of a gated norm: differentiable, in the dtype of its inputs."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    group_size: int,
    eps: float,
    activation: str,
    gates_first: bool,
) -> Tensor:
    """Normalise groups of channels of rows [T, D], and gate them before or after."""
    gate = silu(gate) if activation == "silu" else gate.sigmoid()
    x = x * gate if gates_first else x
    groups = x.unflatten(-1, (-1, group_size))
    normed = groups * (groups.square().mean(-1, keepdim=True) + eps).rsqrt()
    y: Tensor = weight * normed.flatten(-2)
    return y if gates_first else y * gate
