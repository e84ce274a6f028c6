"""Definition of the decode step: one sequence after the other, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.delta_rule.op_step_kimi import KimiDeltaStep
from torch_hybrid.ops.delta_rule.reference_step import step_reference, work_dtype


def kimi_delta_step_reference(x: KimiDeltaStep) -> Tensor:
    """Compute the op in float32, or in float64 when ``qkv`` is float64; pools are **mutated**."""
    work = work_dtype(x)
    rate = x.A_log.to(work).exp()[:, None]
    step = x.a.to(work).unflatten(1, x.dt_bias.shape) + x.dt_bias.to(work)
    if x.gate_lower_bound is None:
        g = -rate * F.softplus(step)
    else:
        g = x.gate_lower_bound * torch.sigmoid(rate * step)

    def gate(normed: Tensor, z: Tensor) -> Tensor:
        return x.norm_weight.to(work) * normed * z.sigmoid()

    return step_reference(x, g, x.b.to(work).sigmoid(), gate, x.norm_eps)
