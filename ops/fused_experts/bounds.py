"""Checks of the experts that tokens name, for ids that are on the host."""

from __future__ import annotations

from torch import Tensor


def check_ids(expert_ids: Tensor, num_experts: int) -> None:
    """Raise ValueError unless each id is an expert's, or ``num_experts``, which means none."""
    wrong = (expert_ids < 0) | (expert_ids > num_experts)
    if bool(wrong.any()):
        got = int(expert_ids[wrong][0])
        raise ValueError(f"expert_ids must be in [0, {num_experts}], got {got}")
