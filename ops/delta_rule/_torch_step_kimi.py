"""Implementation "torch": for machines without a compiler, and as a baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.delta_rule.op_step import step_in_torch, verify_by_delta_steps
from torch_hybrid.ops.delta_rule.op_step_kimi import KimiDeltaStep
from torch_hybrid.ops.pointwise import sigmoid, softplus


def kimi_delta_step(x: KimiDeltaStep) -> Tensor:
    """Launch ``torch_hybrid::kimi_delta_step``: a token of all sequences at a time."""
    if x.records is not None:
        return verify_by_delta_steps(kimi_delta_step, x)

    def log_decay(a: Tensor) -> Tensor:
        rate = x.A_log.float().exp()[:, None]
        step = a.float().unflatten(1, x.dt_bias.shape) + x.dt_bias.float()
        if x.gate_lower_bound is None:
            return -rate * softplus(step)
        return x.gate_lower_bound * sigmoid(rate * step)

    def gated_norm(o: Tensor, z: Tensor) -> Tensor:
        normed = o.float() * torch.rsqrt(o.float().square().mean(-1, keepdim=True) + x.norm_eps)
        return (x.norm_weight.float() * normed * sigmoid(z.float())).to(z.dtype)

    return step_in_torch(x, log_decay=log_decay, gated_norm=gated_norm)
