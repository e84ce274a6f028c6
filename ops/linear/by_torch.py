"""Torch's own product of one weight after the other, into the columns of one result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Torch's products on a GPU are slower into rows and columns that begin elsewhere than at multiples
# of so many numbers.
ALIGNED = 16


def empty_columns(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Make the result [M, sum of sizes] of several weights, whose rows are aligned, not filled."""
    num_columns = sum(sizes)
    apart = num_columns if len(sizes) == 1 else -(-num_columns // ALIGNED) * ALIGNED
    return x.new_empty(x.shape[0], apart)[:, :num_columns]


def product_by_torch(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], y: Tensor
) -> Tensor:
    """Fill y [M, sum of N_i] with what ``linear`` returns, and return it."""
    columns = y.split([weight.shape[0] for weight in weights], dim=1)
    for out, weight, bias in zip(columns, weights, biases, strict=True):
        if bias is None:
            torch.mm(x, weight.T, out=out)
        else:
            torch.addmm(bias, x, weight.T, out=out)
    return y
