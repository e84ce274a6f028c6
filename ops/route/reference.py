"""The oracle: token by token, its experts in a sorted list."""

from __future__ import annotations

import torch
from torch import Tensor


def route(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    *,
    score: str,
    num_groups: int = 1,
    num_best_groups: int = 1,
    renormalise: bool = True,
    epsilon: float = 0.0,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Weights [T, k] and expert ids [T, k], in the dtype of the logits, at least float32."""
    weights, ids = [], []
    for row in logits:
        scores = row.sigmoid() if score == "sigmoid" else row.exp() / row.exp().sum()
        choice = (scores if bias is None else scores + bias).tolist()
        size = len(choice) // num_groups
        groups = [range(first, first + size) for first in range(0, len(choice), size)]
        groups.sort(key=lambda group: -sum(sorted((choice[e] for e in group), reverse=True)[:2]))
        eligible = sorted(e for group in groups[:num_best_groups] for e in group)
        chosen = sorted(eligible, key=lambda e: -choice[e])[:k]
        own = scores[chosen]
        weights.append(scale * (own / (own.sum() + epsilon) if renormalise else own))
        ids.append(torch.tensor(chosen, dtype=torch.int64, device=logits.device))
    return torch.stack(weights), torch.stack(ids)
