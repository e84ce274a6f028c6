"""Both steps in vectorised torch: for machines without a compiler, and as a baseline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_hybrid.ops.delta_step import StepTensors, step_in_torch, verify_by_delta_steps
from torch_hybrid.ops.pointwise import sigmoid, silu, softplus


def gated_delta_step(
    *tensors: Tensor | None,
    activation: str,
    scale: float,
    beta_scale: float,
    norm_eps: float,
    gate: str = "silu",
) -> Tensor:
    """All sequences that have a token together."""
    x = StepTensors(*tensors)  # type: ignore[arg-type]

    def log_decay(a: Tensor) -> Tensor:
        return (-x.A_log.float().exp() * softplus(a.float() + x.dt_bias.float()))[..., None]

    def gated_norm(o: Tensor, z: Tensor) -> Tensor:
        normed = o.float() * torch.rsqrt(o.float().square().mean(-1, keepdim=True) + norm_eps)
        factor = silu(z.float()) if gate == "silu" else sigmoid(z.float())
        return (x.norm_weight * normed.to(o.dtype) * factor).to(z.dtype)

    return step_in_torch(
        x,
        log_decay=log_decay,
        gated_norm=gated_norm,
        activation=activation,
        scale=scale,
        beta_scale=beta_scale,
    )


def gated_delta_verify(*tensors: Tensor | None, **options: Any) -> Tensor:
    """A token of all sequences at a time."""
    return verify_by_delta_steps(gated_delta_step, *tensors, **options)
