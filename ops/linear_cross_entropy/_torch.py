"""Cross entropy of a head by chunks of rows, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.linear_cross_entropy.op import (
    IGNORED,
    LinearCrossEntropyBackward,
    LinearCrossEntropyForward,
    empty_results,
)


@without_autocast
def linear_cross_entropy_forward(x: LinearCrossEntropyForward) -> tuple[Tensor, ...]:
    """Take as many rows at once as have logits about as large as all hidden states."""
    hidden, weight = x.hidden, x.weight
    total, dhidden, dweight = empty_results(x)
    total.zero_()
    sums = torch.zeros_like(dweight, dtype=total.dtype)
    size = max(64, -(-hidden.numel() // weight.shape[0]))
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        log_probs = (hidden[rows] @ weight.T).to(total.dtype).log_softmax(-1)
        target, counts = x.targets[rows, None], x.targets[rows, None] != IGNORED
        picked = log_probs.gather(1, target.clamp(min=0))
        total -= picked.where(counts, 0.0).sum()
        if not x.of_hidden and not x.of_weight:
            continue
        dlogits = log_probs.exp_()
        dlogits.scatter_add_(1, target.clamp(min=0), -torch.ones_like(picked))
        dlogits = dlogits.where(counts, 0.0).to(hidden.dtype)
        if x.of_hidden:
            dhidden[rows] = dlogits @ weight
        if x.of_weight:
            sums += dlogits.T @ hidden[rows]
    return total, dhidden, sums.to(weight.dtype)


def linear_cross_entropy_backward(x: LinearCrossEntropyBackward) -> tuple[Tensor, Tensor]:
    """Scale the gradients that the forward made."""
    dhidden, dweight = x.dhidden * x.dtotal, x.dweight * x.dtotal
    return dhidden.to(x.dhidden.dtype), dweight.to(x.dweight.dtype)
