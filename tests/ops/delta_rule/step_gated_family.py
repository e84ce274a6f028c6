"""The gated delta rule's decode step, its oracle and its parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.delta_rule.step_cases import GatedInputs
from tests.ops.delta_rule.step_family import Family
from tests.ops.delta_rule.step_gated_cases import CASES, make_inputs
from torch_hybrid.ops.delta_rule import gated_delta_rule, gated_delta_step
from torch_hybrid.ops.delta_rule.op_step_gated import IMPLEMENTATIONS, GatedDeltaStep
from torch_hybrid.ops.delta_rule.reference_step_gated import gated_delta_step_reference


def gates(x: GatedInputs) -> tuple[Tensor, Tensor]:
    g = -x.A_log.float().exp() * F.softplus(x.a.float() + x.dt_bias.float())
    return g, x.b.float().sigmoid() * x.beta_scale


def gated_norm(x: GatedInputs, o: Tensor) -> Tensor:
    normed = F.rms_norm(o.float(), (o.shape[-1],), eps=x.norm_eps).to(o.dtype)
    activate = torch.sigmoid if x.gate == "sigmoid" else F.silu
    return (x.norm_weight * normed * activate(x.z.float()).view_as(o)).to(o.dtype)


FAMILY = Family(
    op=gated_delta_step,
    implementations=IMPLEMENTATIONS,
    reference=gated_delta_step_reference,
    cases=CASES,
    make_inputs=make_inputs,
    value=GatedDeltaStep,
    recurrence=gated_delta_rule,
    gates=gates,
    gated_norm=gated_norm,
)
