"""Definition of the decode step: one sequence after the other, in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.delta_rule.op_step_gated import GatedDeltaStep
from torch_hybrid.ops.delta_rule.reference_step import step_reference, work_dtype


def gated_delta_step_reference(x: GatedDeltaStep) -> Tensor:
    """Compute the op in float32, or in float64 when ``qkv`` is float64; pools are **mutated**."""
    dtype, work = x.qkv.dtype, work_dtype(x)
    g = -x.A_log.to(work).exp() * F.softplus(x.a.to(work) + x.dt_bias.to(work))
    beta = x.b.to(work).sigmoid() * x.beta_scale

    def gate(normed: Tensor, z: Tensor) -> Tensor:
        return x.norm_weight * normed.to(dtype) * (F.silu(z) if x.gate == "silu" else z.sigmoid())

    return step_reference(x, g, beta, gate, x.norm_eps)
