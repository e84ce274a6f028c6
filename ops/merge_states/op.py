"""merge_states: its declaration and the list of its implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS
from torch_hybrid.ops.core.declare import Cpp, Op, Strided, define, pair_like
from torch_hybrid.ops.implementations import in_cpp, in_torch

IMPLEMENTATIONS = {
    "cpp": in_cpp(
        "torch_hybrid.ops.merge_states._cpu.cpp:merge_states",
        multiples={"v_head_dim": 16},
        checks_indices=False,
    ),
    "torch": in_torch("torch_hybrid.ops.merge_states._torch:merge_states", cuda_graph=True),
}


@dataclass(slots=True, repr=False, eq=False)
class MergeStates(Op):
    """Attention result over both of two disjoint sets of keys, joined from those over each.

    Commutative, and associative up to rounding; ``(0, -inf)``, the result over no keys, is its
    identity, also when both are empty.

    Args:
        o_a: [T, H, Dv], float32, bfloat16 or float16, contiguous.
        lse_a: [T, H] float32, contiguous, natural logarithm: a base-2 one must be multiplied by
            ln 2 first.
        o_b: as o_a.
        lse_b: as lse_a.

    Returns:
        The output, [T, H, Dv] in the dtype of o_a, and its natural-log LSE, [T, H] float32.
    """

    o_a: Annotated[Tensor, Strided("T", "H", "Dv")]
    lse_a: Annotated[Tensor, Strided("T", "H", dtype=torch.float32)]
    o_b: Annotated[Tensor, Strided("T", "H", "Dv")]
    lse_b: Annotated[Tensor, Strided("T", "H", dtype=torch.float32)]

    def check_form(self) -> None:
        """Raise ValueError unless the results have heads."""
        if self.o_a.dim() != 3:
            raise ValueError(f"o_a must have 3 dimensions, got {self.o_a.dim()}")

    def check(self) -> None:
        """Raise ValueError unless all tensors are contiguous."""
        for name in ("o_a", "lse_a", "o_b", "lse_b"):
            if not (tensor := getattr(self, name)).is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


merge_states = define(
    MergeStates,
    IMPLEMENTATIONS,
    returns=pair_like("o_a", "lse_a"),
    limited={"v_head_dim": "Dv"},
    floats=FLOATS,
    cpp=Cpp("Dv=dim", {"rows": "x.lse_a.numel()"}),
)
