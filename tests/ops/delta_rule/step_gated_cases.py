"""Inputs of the gated delta rule's decode step: shapes of real models, and odd small ones."""

from __future__ import annotations

from functools import partial

import torch

from tests.ops.delta_rule.step_cases import Case, Inputs, random_inputs

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
