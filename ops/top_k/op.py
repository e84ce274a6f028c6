"""top_k: its declaration and the list of its implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS
from torch_hybrid.ops.core.declare import Op, Strided, define, pair_made
from torch_hybrid.ops.implementations import in_torch, in_triton

IMPLEMENTATIONS = {
    "triton": in_triton(
        "torch_hybrid.ops.top_k._triton:top_k", limits={"num_columns": 1024, "k": 32}
    ),
    "torch": in_torch("torch_hybrid.ops.top_k._torch:top_k", cuda_graph=True),
}


@dataclass(slots=True, repr=False, eq=False)
class TopK(Op):
    """Largest k elements along the last dim, in falling order, and their places.

    Of equal elements the first stands first, and NaN is larger than any number. ``torch.topk``
    leaves the order of equal ones open.

    Args:
        x: [..., E], float32, bfloat16 or float16, E at least k.
        k: at least 1.

    Returns:
        The elements, [..., k] in the dtype of x, and their places, [..., k] int64.
    """

    x: Annotated[Tensor, Strided("*x.shape")]
    k: int

    def check_form(self) -> None:
        """Raise ValueError unless a row has k elements."""
        x, k = self.x, self.k
        if x.dim() == 0 or not 1 <= k <= x.shape[-1]:
            raise ValueError(f"x must have at least k = {k} elements in a row, got {list(x.shape)}")

    def empty(self) -> tuple[Tensor, Tensor]:
        """Make the results, not filled yet."""
        shape = (*self.x.shape[:-1], self.k)
        return self.x.new_empty(shape), self.x.new_empty(shape, dtype=torch.int64)


top_k = define(
    TopK,
    IMPLEMENTATIONS,
    returns=pair_made(TopK.empty),
    limited={"num_columns": "x.shape[-1]", "k": "k"},
    floats=FLOATS,
)
TOP_K: torch._ops.OpOverload = torch.ops.torch_hybrid.top_k.default
