"""The oracle: token by token, its experts in a sorted list."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.route.op import Route


def route(x: Route) -> tuple[Tensor, Tensor]:
    """Compute weights [T, k], in the dtype of the logits, and expert ids [T, k]."""
    weights, ids = [], []
    for row in x.logits:
        scores = row.sigmoid() if x.score == "sigmoid" else row.exp() / row.exp().sum()
        choice = (scores if x.bias is None else scores + x.bias).tolist()
        size = len(choice) // x.num_groups
        groups = [range(first, first + size) for first in range(0, len(choice), size)]
        groups.sort(key=lambda group: -sum(sorted((choice[e] for e in group), reverse=True)[:2]))
        eligible = sorted(e for group in groups[: x.num_best_groups] for e in group)
        chosen = sorted(eligible, key=lambda e: -choice[e])[: x.k]
        own = scores[chosen]
        weights.append(x.scale * (own / (own.sum() + x.epsilon) if x.renormalise else own))
        ids.append(torch.tensor(chosen, dtype=torch.int64, device=x.logits.device))
    return torch.stack(weights), torch.stack(ids)
