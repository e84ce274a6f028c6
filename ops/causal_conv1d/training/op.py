"""Short convolution without a pool: initial states go in, final states come out.

The forward runs the kernels of ``causal_conv1d`` on a pool of its own. The backward is an op of its
own, which is given what the forward was given, and convolves again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from torch import Tensor

from torch_hybrid.ops.causal_conv1d.op import IMPLEMENTATIONS, MAX_WIDTH, MIN_WIDTH, CausalConv1d
from torch_hybrid.ops.conv_step import check_activation
from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64, Implementation
from torch_hybrid.ops.core.declare import Cpp, Dense, Index, Rows
from torch_hybrid.ops.core.packed import PackedOp, by_pool, define_pair
from torch_hybrid.ops.implementations import in_cpp, in_torch, in_triton

_FOLDER = "torch_hybrid.ops.causal_conv1d.training"
FORWARD = by_pool(IMPLEMENTATIONS)
BACKWARD: dict[str, Implementation] = {
    "cpp": in_cpp(f"{_FOLDER}._cpu.cpp:causal_conv1d_backward", checks_indices=False),
    "triton": in_triton(f"{_FOLDER}._triton:causal_conv1d_backward"),
    "torch": in_torch(f"{_FOLDER}._torch:causal_conv1d_backward", dtypes=FLOATS_AND_FLOAT64),
}


@dataclass(slots=True, repr=False, eq=False)
class TrainedCausalConv1d(PackedOp):
    """Short causal convolution without a pool; ``torch_hybrid.functional`` states it.

    Args:
        x: [T, C], float dtype; weight [C, W] and bias [C] or None in that dtype.
        initial_state: [N, W - 1, C] in x's dtype, or None for zeros.
        activation: "none" or "silu".

    Returns:
        [T, C] outputs, and final states like initial ones, or [0, W - 1, C].
    """

    like: ClassVar[str] = "x"

    x: Annotated[Tensor, Rows("C")]
    weight: Annotated[Tensor, Dense("C", "W")]
    bias: Annotated[Tensor | None, Dense("C")]
    cu_seqlens: Annotated[Tensor, Index("num_offsets", counts=True)]
    initial_state: Annotated[Tensor | None, Dense("num_offsets - 1", "W - 1", "C")]
    activation: str = field(kw_only=True)

    @property
    def silu(self) -> bool:
        """Flag of the activation SiLU."""
        return self.activation == "silu"

    def check(self) -> None:
        """Raise ValueError for filters or an activation that no implementation takes."""
        check_activation(self.activation)
        width = self.weight.shape[1]
        if not MIN_WIDTH <= width <= MAX_WIDTH:
            raise ValueError(f"weight must have width {MIN_WIDTH} to {MAX_WIDTH}, got {width}")

    def on_pool(self, pool: Tensor, initial: Tensor, final: Tensor) -> CausalConv1d:
        """Give the arguments of the op with a pool."""
        given = (self.x, self.weight, self.bias, pool, self.cu_seqlens, initial, final)
        return CausalConv1d(*given, activation=self.activation, impl=self.impl)


causal_conv1d_forward, causal_conv1d_backward = define_pair(
    TrainedCausalConv1d,
    FORWARD,
    BACKWARD,
    cpp=Cpp("num_offsets-1=num_seqs C=channels W=width"),
    flops=("2 * T * C * W", "6 * T * C * W"),
)
