"""Weights of tokens as whole numbers: their sums are the same in any order.

A sum of floats depends on how it is cut into parts, which differs with the device, the size of the
batch and the algorithm. Sums of integers do not, so that a row draws the same token however it is
filtered and drawn: on the host from a few candidates, or in a captured graph from all tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOT_FINITE = -1  # in the place of a token, of a row with NaN or infinity among its logits
_ONE = 2.0**40  # of the likeliest token; four million of them still fit into 63 bits


def weights_of(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """Compute exp(logits / temperature) in single precision, with the best token at 1."""
    return (logits.float() - best.float()).div_(temperature).exp_()


def as_counts(weights: Tensor) -> Tensor:
    """Count float32 weights, of which the likeliest token's is 1, in int64."""
    return (weights * _ONE).long()


def nucleus_mass(total: Tensor, top_p: Tensor) -> Tensor:
    """Return the least count that reaches a fraction ``top_p`` (float64) of ``total``."""
    return torch.minimum((top_p * total).ceil().long(), total)  # doubles have fewer bits


def draw_from(counts: Tensor, numbers: Tensor) -> Tensor:
    """Find the place at which each row's running sum passes its number.

    Args:
        counts: [N, M].
        numbers: [N, 1] float64, in [0, 1).

    Returns:
        [N] int64; 0 for a row of zeros.
    """
    reached = counts.cumsum(dim=-1)
    total = reached[:, -1:]
    target = torch.minimum((numbers * total).long(), total - 1)
    return torch.searchsorted(reached, target, right=True).squeeze(-1)
