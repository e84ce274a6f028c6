"""Implementation "torch": for machines without a compiler, and as a baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.delta_rule.op_step import step_in_torch, verify_by_delta_steps
from torch_hybrid.ops.delta_rule.op_step_gated import GatedDeltaStep
from torch_hybrid.ops.pointwise import sigmoid, silu, softplus


def gated_delta_step(x: GatedDeltaStep) -> Tensor:
    """Launch ``torch_hybrid::gated_delta_step``: a token of all sequences at a time."""
    if x.records is not None:
        return verify_by_delta_steps(gated_delta_step, x)

    def log_decay(a: Tensor) -> Tensor:
        return (-x.A_log.float().exp() * softplus(a.float() + x.dt_bias.float()))[..., None]

    def gated_norm(o: Tensor, z: Tensor) -> Tensor:
        normed = o.float() * torch.rsqrt(o.float().square().mean(-1, keepdim=True) + x.norm_eps)
        factor = silu(z.float()) if x.gate == "silu" else sigmoid(z.float())
        return (x.norm_weight * normed.to(o.dtype) * factor).to(z.dtype)

    return step_in_torch(x, log_decay=log_decay, gated_norm=gated_norm, beta_scale=x.beta_scale)
