"""Implementation "torch": one batched product."""

from __future__ import annotations

import torch
from torch import Tensor


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Launcher of ``torch_hybrid::head_linear``."""
    out = torch.bmm(x.transpose(0, 1), weight.transpose(1, 2))
    return out.transpose(0, 1).contiguous()
