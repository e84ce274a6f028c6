"""Implementation "torch": on any device, in an order of additions that goes by sizes."""

from __future__ import annotations

import torch
from torch import Tensor


def power_sum(x: Tensor, power: int, addend: Tensor | None = None) -> Tensor:
    """Launcher of ``torch_hybrid::power_sum``."""
    x = x if addend is None else x + addend
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide if power == 1 else wide * wide).sum(-1)
