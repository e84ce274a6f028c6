"""power_sum: its declaration and the list of its implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64
from torch_hybrid.ops.core.declare import Op, Strided, define, made
from torch_hybrid.ops.implementations import INVARIANT, in_torch, in_triton

IMPLEMENTATIONS = {
    "triton": in_triton("torch_hybrid.ops.power_sum._triton:power_sum", features=INVARIANT),
    "torch": in_torch(
        "torch_hybrid.ops.power_sum._torch:power_sum", dtypes=FLOATS_AND_FLOAT64, cuda_graph=True
    ),
}


@dataclass(slots=True, repr=False, eq=False)
class PowerSum(Op):
    """Sum of the elements along the last dim, or of their squares.

    ``out[...] = sum(y[..., d] ** power for d)`` of ``y = x + addend``, which is rounded to the
    dtype of x. Sums are float32, of float64 tensors float64.

    Args:
        x: [..., D] float, rows any distance apart.
        power: 1 or 2.
        addend: like x; None: there is none.

    Returns:
        [...] float32, of float64 tensors float64. But with "torch" a row's has the bits that it has
        alone, wherever it lies.
    """

    x: Annotated[Tensor, Strided("*x.shape")]
    power: int
    addend: Annotated[Tensor | None, Strided("*x.shape")] = None

    def check_form(self) -> None:
        """Raise ValueError unless there are rows, and a power that is one of the two."""
        if self.x.dim() == 0:
            raise ValueError(f"x must have at least one dimension, got {list(self.x.shape)}")
        if self.power not in (1, 2):
            raise ValueError(f"power must be 1 or 2, got {self.power}")

    def empty(self) -> Tensor:
        """Make the result, not filled yet."""
        dtype = torch.promote_types(self.x.dtype, torch.float32)
        return self.x.new_empty(self.x.shape[:-1], dtype=dtype)


power_sum = define(PowerSum, IMPLEMENTATIONS, returns=made(PowerSum.empty), floats=frozenset())
POWER_SUM: torch._ops.OpOverload = torch.ops.torch_hybrid.power_sum.default
