"""Kimi delta attention's decode step, its oracle and its parts."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tests.ops.delta_rule.step_cases import KimiInputs
from tests.ops.delta_rule.step_family import Family
from tests.ops.delta_rule.step_kimi_cases import CASES, make_inputs
from torch_hybrid.ops.delta_rule import kimi_delta_attention, kimi_delta_step
from torch_hybrid.ops.delta_rule.op_step_kimi import IMPLEMENTATIONS, KimiDeltaStep
from torch_hybrid.ops.delta_rule.reference_step_kimi import kimi_delta_step_reference


def gates(x: KimiInputs) -> tuple[Tensor, Tensor]:
    rate = x.A_log.float().exp()[:, None]
    step = x.a.float().unflatten(1, x.dt_bias.shape) + x.dt_bias.float()
    bound = x.gate_lower_bound
    g = -rate * F.softplus(step) if bound is None else bound * (rate * step).sigmoid()
    return g, x.b.float().sigmoid()


def gated_norm(x: KimiInputs, o: Tensor) -> Tensor:
    normed = F.rms_norm(o.float(), (o.shape[-1],), x.norm_weight.float(), x.norm_eps)
    return (normed * x.z.float().sigmoid().view_as(o)).to(o.dtype)


FAMILY = Family(
    op=kimi_delta_step,
    implementations=IMPLEMENTATIONS,
    reference=kimi_delta_step_reference,
    cases=CASES,
    make_inputs=make_inputs,
    value=KimiDeltaStep,
    recurrence=kimi_delta_attention,
    gates=gates,
    gated_norm=gated_norm,
)
