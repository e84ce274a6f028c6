"""Implementation "cpp": the kernel of ``ops/native``, or torch's product where that is faster."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.matrix_product.op import MatrixProductForward
from torch_hybrid.ops.native.matrix_product import multiply


def matrix_product(x: MatrixProductForward) -> Tensor:
    """Multiply."""
    return multiply(x.a, x.b, x.empty())
