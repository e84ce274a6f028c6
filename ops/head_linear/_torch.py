"""Implementation "torch": one batched product."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.head_linear.op import HeadLinear


def head_linear(x: HeadLinear) -> Tensor:
    """Launch ``torch_hybrid::head_linear``."""
    out = torch.bmm(x.x.transpose(0, 1), x.weight.transpose(1, 2))
    return out.transpose(0, 1).contiguous()
