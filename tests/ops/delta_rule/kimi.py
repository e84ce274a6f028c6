"""Inputs of Kimi delta attention: shapes of real models and odd small ones."""

from __future__ import annotations

import torch

from tests.ops.delta_rule.cases import Case, Inputs, random_inputs


def case(
    *lengths: int, num_heads: int = 2, k_dim: int = 16, v_dim: int = 16, num_padding_tokens: int = 0
) -> Case:
    """A case with as many key heads as value heads."""
    return Case(
        lengths=lengths,
        num_k_heads=num_heads,
        num_v_heads=num_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        num_padding_tokens=num_padding_tokens,
    )


CASES = {
    "one_token": case(1, num_heads=1),
    "decode": case(1, 1, 1, 1, 1, k_dim=32, v_dim=32),
    "mixed": case(5, 0, 1, 70, 33, 2, 64, k_dim=32, v_dim=24, num_padding_tokens=3),
    "one_head": case(17, 40, num_heads=1, k_dim=16, v_dim=48),
    "odd_dims": case(3, 37, 16, num_heads=3, k_dim=19, v_dim=27),
    "kimi_linear": case(1, 130, 16, k_dim=128, v_dim=128),
    "unlike_dims": case(63, 65, k_dim=80, v_dim=72),
}


def make_inputs(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Inputs with a decay for each channel."""
    return random_inputs(case, dtype, seed, channels=True)
