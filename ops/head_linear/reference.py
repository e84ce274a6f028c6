"""The oracle: one sum for each element."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.head_linear.op import HeadLinear


def head_linear(x: HeadLinear) -> Tensor:
    """Compute ``out[t, h, n] = sum_k weight[h, n, k] x[t, h, k] + bias[h, n]``."""
    work = torch.promote_types(x.x.dtype, torch.float32)
    out = torch.einsum("thk,hnk->thn", x.x.to(work), x.weight.to(work))
    return (out if x.bias is None else out + x.bias.to(work)).to(x.x.dtype)
