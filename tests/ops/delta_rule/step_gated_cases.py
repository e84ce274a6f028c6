"""Inputs of the gated delta rule's decode step, and its parts: shapes of models, and odd ones."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.delta_rule.step_cases import Case, GatedInputs, Inputs, random_inputs
from tests.ops.delta_rule.step_family import Family
from torch_hybrid.ops.delta_rule import gated_delta_rule, gated_delta_step
from torch_hybrid.ops.delta_rule.op_step_gated import IMPLEMENTATIONS
from torch_hybrid.ops.delta_rule.reference_step_gated import gated_delta_step_reference

case = partial(Case, options=(("beta_scale", 1.0),))

CASES = {
    "one_token": case(lengths=(1,), num_k_heads=1, num_v_heads=1),
    "mixed": case(lengths=(1, 0, 1, 1, 1, 0, 1), num_padding_tokens=3),
    "three_value_heads": case(lengths=(1, 1), num_v_heads=6, k_dim=48, width=3, has_bias=True),
    "odd_dims": case(lengths=(1, 1, 1), num_v_heads=2, k_dim=19, v_dim=27, activation="none"),
    "wide_parameters": case(lengths=(1, 1), k_dim=64, width=8, has_bias=True, wide=True),
    "qwen3_next": case(lengths=(1,) * 8, k_dim=128, v_dim=128),
    "qwen4_exp": Case(
        lengths=(1, 1),
        k_dim=32,
        v_dim=40,
        options=(("beta_scale", 1.0), ("gate", "sigmoid")),
    ),
    "olmo_hybrid": Case(
        lengths=(1, 1),
        num_k_heads=1,
        num_v_heads=1,
        k_dim=96,
        v_dim=192,
        options=(("beta_scale", 2.0),),
    ),
}


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Inputs with a decay for each value head."""
    return random_inputs(case, dtype, seed, by_channel=False)


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
    recurrence=gated_delta_rule,
    gates=gates,
    gated_norm=gated_norm,
)
