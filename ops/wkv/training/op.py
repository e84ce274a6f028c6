"""RWKV's weighted average of past values without pools: states go in and come out.

The forward runs the kernels of ``wkv`` on a pool of its own. The backward is an op of its own,
which is given what the forward was given, and recomputes the states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64, Implementation
from torch_hybrid.ops.core.declare import Cpp, Dense, Index, Rows
from torch_hybrid.ops.core.packed import PackedOp, by_pool, define_pair
from torch_hybrid.ops.implementations import cut, in_cpp, in_torch, in_triton
from torch_hybrid.ops.wkv.op import IMPLEMENTATIONS, NOTHING, Wkv

_FOLDER = "torch_hybrid.ops.wkv.training"
FORWARD = by_pool(
    {
        "cpp": IMPLEMENTATIONS["cpp"],
        "triton": cut(IMPLEMENTATIONS["triton"]),
        "torch": IMPLEMENTATIONS["torch"],
    }
)
BACKWARD: dict[str, Implementation] = {
    "cpp": in_cpp(f"{_FOLDER}._cpu.cpp:wkv_backward"),
    "triton": in_triton(f"{_FOLDER}._triton:wkv_backward"),
    "torch": in_torch(f"{_FOLDER}._torch:wkv_backward", dtypes=FLOATS_AND_FLOAT64),
}


@dataclass(slots=True, repr=False, eq=False)
class TrainedWkv(PackedOp):
    """Weighted average of past values without a pool; ``torch_hybrid.functional`` states it.

    Args:
        k: [T, C], float dtype. v [T, C] in that dtype.
        log_decay: [C] float32, or float64 beside float64. bonus [C] like it.
        initial_state: [N, 3, C] like log_decay, or None: all sequences start from nothing.

    Returns:
        [T, C] outputs in k's dtype, and final states like initial ones, or [0, 3, C].
    """

    like: ClassVar[str] = "k"

    k: Annotated[Tensor, Rows("C")]
    v: Annotated[Tensor, Rows("C")]
    log_decay: Annotated[Tensor, Dense("C", dtype="work")]
    bonus: Annotated[Tensor, Dense("C", dtype="work")]
    cu_seqlens: Annotated[Tensor, Index("num_offsets", counts=True)]
    initial_state: Annotated[Tensor | None, Dense("num_offsets - 1", "3", "C", dtype="work")]

    def on_pool(self, pool: Tensor, initial: Tensor, final: Tensor) -> Wkv:
        """Give the arguments of the op with a pool."""
        if self.initial_state is None:  # empty sequences leave nothing
            pool[:, 2] = NOTHING
        given = (self.k, self.v, self.log_decay, self.bonus, pool)
        return Wkv(*given, self.cu_seqlens, initial, final, impl=self.impl)


wkv_forward, wkv_backward = define_pair(
    TrainedWkv,
    FORWARD,
    BACKWARD,
    cpp=Cpp("num_offsets-1=num_seqs C=num_channels"),
)
