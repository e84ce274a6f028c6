"""matrix_product_forward: its declaration. Its gradients are two more such products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64
from torch_hybrid.ops.core.declare import Op, Strided, define, made
from torch_hybrid.ops.implementations import in_cpp, in_torch

_FOLDER = "torch_hybrid.ops.matrix_product"


@dataclass(slots=True, repr=False, eq=False)
class MatrixProductForward(Op):
    """Product of two matrices, each of any strides.

    Args:
        a: [M, K], float dtype.
        b: [K, N] in that dtype.

    Returns:
        [M, N] in the dtype of ``a``.
    """

    a: Annotated[Tensor, Strided("M", "K")]
    b: Annotated[Tensor, Strided("K", "N")]

    def empty(self) -> Tensor:
        """Make the result, not filled yet."""
        return self.a.new_empty(self.a.shape[0], self.b.shape[1])


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    of_a, of_b = ctx.needs_input_grad[:2]
    impl = ctx.options["impl"]
    da = matrix_product_forward(dout, b.T, impl=impl) if of_a else None
    return da, matrix_product_forward(a.T, dout, impl=impl) if of_b else None


matrix_product_forward = define(
    MatrixProductForward,
    {
        "cpp": in_cpp(
            f"{_FOLDER}._cpu:matrix_product",
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            checks_indices=False,
        ),
        "torch": in_torch(
            f"{_FOLDER}._torch:matrix_product", dtypes=FLOATS_AND_FLOAT64, cuda_graph=True
        ),
    },
    returns=made(MatrixProductForward.empty),
    backward=_gradients,
    flops="2 * M * K * N",
)
