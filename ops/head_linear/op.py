"""head_linear: its declaration and the list of its implementations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64
from torch_hybrid.ops.core.declare import Cpp, Dense, Op, Strided, define, made
from torch_hybrid.ops.implementations import INVARIANT, in_cpp, in_torch, in_triton
from torch_hybrid.ops.native.cpu_tuning import is_bf16_slow

_PACKAGE = "torch_hybrid.ops.head_linear"

IMPLEMENTATIONS = {
    "cpp": in_cpp(f"{_PACKAGE}._cpu.cpp:head_linear", features=INVARIANT, checks_indices=False),
    "triton": in_triton(f"{_PACKAGE}._triton:head_linear", features=INVARIANT),
    "torch": in_torch(f"{_PACKAGE}._torch:head_linear", dtypes=FLOATS_AND_FLOAT64, cuda_graph=True),
}


def is_faster_than_bmm(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether the op is faster than torch's batched product, as this machine measured."""
    return device.type == "cpu" and dtype == torch.bfloat16 and is_bf16_slow()


@dataclass(slots=True, repr=False, eq=False)
class HeadLinear(Op):
    """Product of each head of each token and the head's own weight matrix.

    ``out[t, h] = weight[h] @ x[t, h] + bias[h]``. Sums are float32, of float64 tensors float64.

    Args:
        x: [T, H, K] float; tokens and heads may lie any distance apart, one head is contiguous.
        weight: [H, N, K] in x's dtype, or a transposed view of [H, K, N]: one of its last two dims
            is contiguous.
        bias: [H, N] contiguous, in x's dtype, added before a sum is rounded; None: nothing.

    Returns:
        [T, H, N] in x's dtype. But with "torch" a token's have the bits that they have alone.

    The projections to and from latents of MLA's absorbed form (arXiv 2405.04434).
    """

    x: Annotated[Tensor, Strided("T", "H", "K")]
    weight: Annotated[Tensor, Strided("H", "N", "K")]
    bias: Annotated[Tensor | None, Dense("H", "N")] = field(default=None, kw_only=True)

    def check(self) -> None:
        """Raise ValueError unless heads, and rows or columns of weights, are contiguous."""
        x, weight = self.x, self.weight
        if x.stride(2) != 1 and x.shape[2] > 1:
            raise ValueError(f"x must have contiguous heads, got strides {list(x.stride())}")
        if 1 not in weight.stride()[1:]:
            raise ValueError(
                f"weight must have contiguous rows or columns, got strides {list(weight.stride())}"
            )

    def empty(self) -> Tensor:
        """Make the result, not filled yet."""
        return self.x.new_empty(*self.x.shape[:2], self.weight.shape[1])


head_linear = define(
    HeadLinear,
    IMPLEMENTATIONS,
    returns=made(HeadLinear.empty),
    floats=frozenset(),
    flops="2 * T * H * K * N",
    cpp=Cpp(
        "T H N K",
        {
            "weight_head": "x.weight.stride(0)",
            "weight_row": "x.weight.stride(1)",
            "weight_column": "x.weight.stride(2)",
        },
    ),
)
