"""The oracle: the sum as torch has it."""

from __future__ import annotations

import torch
from torch import Tensor


def power_sum(x: Tensor, power: int, addend: Tensor | None = None) -> Tensor:
    """Add up the elements of each row, or their squares, in float32 or better."""
    x = x if addend is None else x + addend
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide**power).sum(-1)
