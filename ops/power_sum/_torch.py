"""Implementation "torch": on any device, in an order of additions that goes by sizes."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.power_sum.op import PowerSum


def power_sum(call: PowerSum) -> Tensor:
    """Launch ``torch_hybrid::power_sum``."""
    x = call.x if call.addend is None else call.x + call.addend
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide if call.power == 1 else wide * wide).sum(-1)
