"""One product of a mixture's experts: each row by the matrix of its expert."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import NO_FEATURES
from torch_hybrid.ops.core.declare import Dense, Index, Op, Rows, define, made
from torch_hybrid.ops.core.registration import check_dtypes, check_shapes
from torch_hybrid.ops.formats import stored_weights
from torch_hybrid.ops.fused_experts.op import FusedExperts
from torch_hybrid.ops.implementations import in_cpp, in_torch, in_triton, invariant

_PACKAGE = "torch_hybrid.ops.fused_experts"
_CPP = in_cpp(
    f"{_PACKAGE}._cpu:expert_linear",
    features=stored_weights.FEATURES,
    figures="torch_hybrid.ops.native.cpu_tuning:figures",
)
_TRITON = in_triton(f"{_PACKAGE}._triton:expert_linear", features=stored_weights.FEATURES)
IMPLEMENTATIONS = {
    "cpp": _CPP,
    "cpp_invariant": invariant(_CPP),
    "triton": _TRITON,
    "triton_invariant": invariant(_TRITON),
    "torch": in_torch(f"{_PACKAGE}._torch:expert_linear", features=stored_weights.FEATURES),
}


@dataclass(slots=True, repr=False, eq=False)
class ExpertLinear(Op):
    """Product of each row with the matrix of its expert: ``out[t] = weight[expert_ids[t]] @ x[t]``.

    It is one of the products of ``fused_experts``, by that op's kernels, for steps that change what
    lies between them. Sums are float32. With scales, weights are dequantized as there.

    Args:
        x: [T, K] float; rows may lie any distance apart, one row is contiguous.
        expert_ids: [T] int32, from 0 to E; E means no expert.
        weight: [E, N, K] contiguous, in x's dtype, or stored as ``down`` of ``fused_experts``.
        scales: of stored weights, as its ``down_scales``; or None.

    Returns:
        [T, N] in x's dtype. A row without an expert is 0; a row depends on itself alone.
    """

    x: Annotated[Tensor, Rows("K")]
    expert_ids: Annotated[Tensor, Index("T")]
    weight: Annotated[Tensor, Dense("E", "N", "stored_width", dtype="any")]
    scales: Annotated[Tensor | None, Dense("...", dtype=(torch.float32, torch.uint8))] = field(
        default=None, kw_only=True
    )

    def features(self) -> frozenset[str]:
        """List what the format of weights with scales asks of an implementation."""
        has_scales = self.scales is not None
        return stored_weights.features_of(self.weight.dtype) if has_scales else NO_FEATURES

    def check(self) -> None:
        """Raise ValueError unless the weight fits x, and its scales."""
        if self.scales is not None:
            stored_weights.check_has_scales("weight", self.weight)
        dtype = self.x.dtype if self.scales is None else self.weight.dtype
        check_dtypes({"weight": (self.weight, dtype)})
        shape = (*self.weight.shape[:2], self.x.shape[1])
        check_shapes({"weight": (self.weight, stored_weights.stored_shape(shape, dtype))})
        if self.scales is not None:
            stored_weights.check_scales(self.weight, self.scales, "scales")

    def check_indices(self) -> None:
        """Raise ValueError unless each id is an expert's, or their number, which means none."""
        self.as_experts().check_indices()

    def as_experts(self) -> FusedExperts:
        """Return arguments of ``fused_experts`` whose second product is this one."""
        return FusedExperts(
            self.x,
            self.expert_ids[:, None],
            self.x[:, :1],
            self.weight,
            self.weight,
            gate_up_scales=self.scales,
            down_scales=self.scales,
            activation="relu2",
            impl=self.impl,
        )

    def empty(self) -> Tensor:
        """Make the result, not filled yet."""
        return self.x.new_empty(self.x.shape[0], self.weight.shape[1])


expert_linear = define(
    ExpertLinear,
    IMPLEMENTATIONS,
    returns=made(ExpertLinear.empty),
    floats=frozenset(),
    flops="2 * T * N * K",
)
