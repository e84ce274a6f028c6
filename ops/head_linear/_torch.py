"""Implementation "torch": one batched product."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.head_linear.op import HeadLinear


def head_linear(x: HeadLinear) -> Tensor:
    """Multiply all heads at once."""
    heads, weight = x.x.transpose(0, 1), x.weight.transpose(1, 2)
    if x.bias is None:
        out = torch.bmm(heads, weight)
    else:
        out = torch.baddbmm(x.bias[:, None], heads, weight)
    return out.transpose(0, 1).contiguous()
