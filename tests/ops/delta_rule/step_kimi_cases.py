"""Inputs of Kimi delta attention's decode step, and its parts: shapes of models, and odd ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.delta_rule.step_cases import Case, Inputs, KimiInputs, random_inputs
from tests.ops.delta_rule.step_family import Family
from torch_hybrid.ops.delta_rule import kimi_delta_attention, kimi_delta_step
from torch_hybrid.ops.delta_rule.op_step_kimi import IMPLEMENTATIONS
from torch_hybrid.ops.delta_rule.reference_step_kimi import kimi_delta_step_reference


def case(
    *lengths: int, num_heads: int = 2, gate_lower_bound: float | None = None, **facts: object
) -> Case:
    """A case with as many key heads as value heads."""
    heads = {"num_k_heads": num_heads, "num_v_heads": num_heads}
    bound = (("gate_lower_bound", gate_lower_bound),)
    return Case(lengths=lengths, **heads, **facts, options=bound)


CASES = {
    "one_token": case(1, num_heads=1),
    "mixed": case(1, 0, 1, 1, 1, 0, 1, num_padding_tokens=3),
    "bounded": case(1, 1, 1, k_dim=48, width=3, has_bias=True, gate_lower_bound=-5.0),
    "odd_dims": case(1, 1, 1, num_heads=3, k_dim=19, v_dim=27, activation="none"),
    "wide_parameters": case(1, 1, k_dim=64, width=8, has_bias=True, wide=True),
    "kimi_linear": case(*[1] * 8, k_dim=128, v_dim=128),
    "ling_3": case(1, 1, k_dim=128, v_dim=128, gate_lower_bound=-5.0),
}


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Inputs with a decay for each channel."""
    return random_inputs(case, dtype, seed, by_channel=True)


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
    recurrence=kimi_delta_attention,
    gates=gates,
    gated_norm=gated_norm,
)
