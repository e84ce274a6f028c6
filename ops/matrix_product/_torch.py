"""Implementation "torch"."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.matrix_product.op import MatrixProductForward


@without_autocast
def matrix_product(x: MatrixProductForward) -> Tensor:
    """Multiply."""
    return torch.mm(x.a, x.b)
