"""Inputs of the gated delta rule: shapes of real models, and odd small ones."""

from __future__ import annotations

import torch

from tests.ops.delta_rule.cases import Case, Inputs, random_inputs

CASES = {
    "one_token": Case(lengths=(1,), num_k_heads=1, num_v_heads=1),
    "decode": Case(lengths=(1,) * 5, num_k_heads=2, num_v_heads=4, k_dim=32, v_dim=32),
    "mixed": Case(lengths=(5, 0, 1, 70, 33, 2, 64), num_padding_tokens=3),
    "one_head": Case(lengths=(17, 40), num_k_heads=1, num_v_heads=1, k_dim=16, v_dim=48),
    "three_value_heads": Case(lengths=(1, 35), num_k_heads=2, num_v_heads=6, k_dim=48, v_dim=16),
    "odd_dims": Case(lengths=(3, 37, 16), num_k_heads=3, num_v_heads=3, k_dim=19, v_dim=27),
    "qwen3_next": Case(lengths=(1, 130, 16), num_k_heads=2, num_v_heads=4, k_dim=128, v_dim=128),
    "olmo_hybrid": Case(lengths=(63, 65), num_k_heads=2, num_v_heads=2, k_dim=96, v_dim=192),
}


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Inputs with one decay for each value head."""
    return random_inputs(case, dtype, seed, channels=False)
