"""The oracle: the sum as torch has it."""

from __future__ import annotations

import torch
from torch import Tensor


def power_sum(x: Tensor, power: int) -> Tensor:
    """Add up the elements of each row, or their squares, in float32 or better."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide**power).sum(-1)
