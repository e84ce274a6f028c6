"""Implementation "torch": as routers of models are written, on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def route(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    *,
    score: str,
    num_groups: int,
    num_best_groups: int,
    renormalise: bool,
    epsilon: float,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``torch_hybrid::route``."""
    logits = logits.float()
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if num_best_groups < num_groups:
        choice = _within_best_groups(choice, num_groups, num_best_groups)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()
    weights = scores.gather(-1, ids)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + epsilon)
    return (weights * scale).to(dtype), ids


def _within_best_groups(choice: Tensor, num_groups: int, num_best: int) -> Tensor:
    """Minus infinity outside of the groups whose two best have the largest sums."""
    groups = choice.unflatten(-1, (num_groups, -1))
    sums = groups.sort(dim=-1, descending=True, stable=True).values[..., :2].sum(-1)
    best = sums.sort(dim=-1, descending=True, stable=True).indices[..., :num_best]
    is_best = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, best, True)
    within: Tensor = groups.masked_fill(~is_best[..., None], -math.inf).flatten(-2)
    return within
