"""Grouped heads: checks of query heads that share key heads, and their division among ranks."""

from __future__ import annotations

from typing import Any

from torch_hybrid.ranks import divide, divide_or_repeat


def check_groups(num_q_heads: int, num_kv_heads: int) -> None:
    """Raise ValueError unless all key heads have the same number of query heads."""
    if num_kv_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_q_heads must be a multiple of num_kv_heads, got {num_q_heads} and {num_kv_heads}"
        )


def divided_heads(num_q_heads: int, num_kv_heads: int, num_ranks: int) -> dict[str, Any]:
    """Divide query heads, and the key heads that they share, among ranks."""
    return {
        "num_q_heads": divide("num_q_heads", num_q_heads, num_ranks),
        "num_kv_heads": divide_or_repeat("num_kv_heads", num_kv_heads, num_ranks),
    }
