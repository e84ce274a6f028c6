"""Inputs of Kimi delta attention's decode step: shapes of real models, and odd small ones."""

from __future__ import annotations

import torch

from tests.ops.delta_rule.step_cases import Case, Inputs, random_inputs


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
