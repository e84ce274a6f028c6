"""Both steps in vectorised torch: for machines without a compiler, and as a baseline."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_hybrid.ops.delta_step import StepTensors, step_in_torch, verify_by_delta_steps
from torch_hybrid.ops.pointwise import sigmoid, softplus


def kimi_delta_step(
    *tensors: Tensor | None,
    activation: str,
    scale: float,
    gate_lower_bound: float | None,
    norm_eps: float,
) -> Tensor:
    """All sequences that have a token together."""
    x = StepTensors(*tensors)  # type: ignore[arg-type]

    def log_decay(a: Tensor) -> Tensor:
        rate = x.A_log.float().exp()[:, None]
        step = a.float().unflatten(1, x.dt_bias.shape) + x.dt_bias.float()
        if gate_lower_bound is None:
            return -rate * softplus(step)
        return gate_lower_bound * sigmoid(rate * step)

    def gated_norm(o: Tensor, z: Tensor) -> Tensor:
        normed = o.float() * torch.rsqrt(o.float().square().mean(-1, keepdim=True) + norm_eps)
        return (x.norm_weight.float() * normed * sigmoid(z.float())).to(z.dtype)

    return step_in_torch(
        x, log_decay=log_decay, gated_norm=gated_norm, activation=activation, scale=scale
    )


def kimi_delta_verify(*tensors: Tensor | None, **options: Any) -> Tensor:
    """A token of all sequences at a time."""
    return verify_by_delta_steps(kimi_delta_step, *tensors, **options)
