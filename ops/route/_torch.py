"""Implementation "torch": as routers of models are written, on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_hybrid.ops.route.op import Route


def route(x: Route) -> tuple[Tensor, Tensor]:
    """Launch ``torch_hybrid::route``."""
    logits = x.logits.float()
    scores = logits.sigmoid() if x.score == "sigmoid" else logits.softmax(-1)
    choice = scores if x.bias is None else scores + x.bias
    if x.num_best_groups < x.num_groups:
        choice = _within_best_groups(choice, x.num_groups, x.num_best_groups)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[..., : x.k].contiguous()
    weights = scores.gather(-1, ids)
    if x.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + x.epsilon)
    return (weights * x.scale).to(x.dtype), ids


def _within_best_groups(choice: Tensor, num_groups: int, num_best: int) -> Tensor:
    """Set to minus infinity what is outside of the groups whose two best have the largest sums."""
    groups = choice.unflatten(-1, (num_groups, -1))
    sums = groups.sort(dim=-1, descending=True, stable=True).values[..., :2].sum(-1)
    best = sums.sort(dim=-1, descending=True, stable=True).indices[..., :num_best]
    is_best = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, best, True)
    within: Tensor = groups.masked_fill(~is_best[..., None], -math.inf).flatten(-2)
    return within
