"""The oracle: each row by itself, its tokens sorted, its sums those of Python's integers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_hybrid.ops.draw_tokens.counts import NOT_FINITE, as_counts, weights_of
from torch_hybrid.ops.draw_tokens.op import DrawTokens


def draw_tokens(x: DrawTokens) -> Tensor:
    """Draw a token for each row; see the op."""
    rows = zip(x.logits, x.settings.t().tolist(), strict=True)
    return torch.tensor(
        [_drawn(row, *own) for row, own in rows], dtype=torch.int64, device=x.logits.device
    )


def _drawn(
    row: Tensor, temperature: float, number: float, top_k: float, top_p: float, min_p: float
) -> int:
    best, token = row.max(-1)
    if not math.isfinite(best):
        return NOT_FINITE
    if temperature == 0:
        return int(token)
    divisor = torch.tensor([temperature], dtype=torch.float64, device=row.device)
    exact = weights_of(row, best, divisor)
    weights, counts = exact.tolist(), as_counts(exact).tolist()
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    least = weights[order[min(int(top_k), len(order)) - 1]] if top_k else 0.0
    if top_p < 1:
        kept = [i for i in order if weights[i] >= least]
        total = sum(counts[i] for i in kept)
        wanted, reached = min(math.ceil(top_p * float(total)), total), 0
        for i in kept:
            reached += counts[i]
            if reached >= wanted:
                least = weights[i]
                break
    kept = [i for i in range(len(weights)) if weights[i] >= max(least, min_p)]
    total = sum(counts[i] for i in kept)
    target, reached = min(int(number * float(total)), total - 1), 0
    for i in kept:
        reached += counts[i]
        if reached > target:
            return i
    raise AssertionError("the last one reaches the sum")
