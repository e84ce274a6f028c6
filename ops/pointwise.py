"""Functions of single numbers whose bits do not depend on where these lie in a tensor.

Torch computes the last numbers of a tensor, and of each thread's share, one by one, and the others
by vectors. Of ``sigmoid``, ``silu`` and ``softplus`` the two differ in their last bit: a row would
have other bits beside other rows. Of ``exp``, ``log`` and arithmetic they are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Map x to 1 / (1 + e^-x)."""
    return 1 / (1 + (-x).exp())


def silu(x: Tensor) -> Tensor:
    """Map x to x / (1 + e^-x)."""
    return x / (1 + (-x).exp())


def softplus(x: Tensor) -> Tensor:
    """Map x to log(1 + e^x)."""
    e = (-x.abs()).exp()
    # The quotient gives back what rounding 1 + e lost; where all of e is lost, log(1 + e) is e.
    rounded = 1 + e
    log1p = torch.where(rounded == 1, e, rounded.log() * (e / (rounded - 1)))
    return x.clamp(min=0) + log1p
