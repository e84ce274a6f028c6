"""Queries and keys of unit length, as the models make them: 1e-6 is added to the square."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_length(x: Tensor) -> Tensor:
    """Compute the factor ``[..., 1]`` that scales the last dimension to unit length."""
    return torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def l2_normalize(x: Tensor) -> Tensor:
    """Scale the last dimension to unit length."""
    return x * inverse_length(x)


def gradient_before(grad: Tensor, unit: Tensor, inverse: Tensor) -> Tensor:
    """Take a gradient of rows ``unit`` to one of the rows before ``inverse`` scaled them."""
    return inverse * (grad - unit * (unit * grad).sum(-1, keepdim=True))
