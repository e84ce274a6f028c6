"""Torch's own product of one weight after the other, into the columns of one result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
