"""Grouped heads: checks of query heads that share key heads."""

from __future__ import annotations


def check_groups(num_q_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError unless all key heads have the same number of query heads."""
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_q_heads must be a multiple of num_kv_heads, got {num_q_heads} and {num_kv_heads}"
        )
