"""RWKV's weighted average of past values without pools: states go in and come out.

The forward runs the kernels of ``wkv`` on a pool of its own. The backward is an op of its own,
which is given what the forward was given, and recomputes the states.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
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
    """Arguments that the forward and its backward have."""

    k: Annotated[Tensor, Rows("C")]
    v: Annotated[Tensor, Rows("C")]
    log_decay: Annotated[Tensor, Dense("C", dtype="work")]
    bonus: Annotated[Tensor, Dense("C", dtype="work")]
    cu_seqlens: Annotated[Tensor, Index("num_offsets", counts=True)]
    initial_state: Annotated[Tensor | None, Dense("num_offsets - 1", "3", "C", dtype="work")]

    def states(self, num_states: int) -> Tensor:
        """Allocate so many states [3, C]."""
        work = torch.promote_types(self.k.dtype, torch.float32)
        return self.k.new_empty(num_states, 3, self.k.shape[1], dtype=work)


@dataclass(slots=True, repr=False, eq=False)
class WkvForward(TrainedWkv):
    """Weighted average of past values without a pool; ``torch_hybrid.functional`` states it.

    Args:
        k: [T, C], float dtype. v [T, C] in that dtype.
        log_decay: [C] float32, or float64 beside float64. bonus [C] like it.
        initial_state: [N, 3, C] like log_decay, or None: all sequences start from nothing.

    Returns:
        [T, C] outputs in k's dtype, and final states like initial ones, or [0, 3, C].
    """

    output_final_state: bool = field(kw_only=True)

    def on_pool(self, pool: Tensor, initial: Tensor, final: Tensor) -> Wkv:
        """Give the arguments of the op with a pool."""
        if self.initial_state is None:  # empty sequences leave nothing
            pool[:, 2] = NOTHING
        given = (self.k, self.v, self.log_decay, self.bonus, pool)
        return Wkv(*given, self.cu_seqlens, initial, final, impl=self.impl)


@dataclass(slots=True, repr=False, eq=False)
class WkvBackward(TrainedWkv):
    """Gradients of :func:`wkv_forward`, in fixed orders of sums.

    Args:
        k, v, log_decay, bonus, cu_seqlens, initial_state: those of the forward.
        dout: [T, C] gradient of the outputs, in k's dtype.
        dfinal_state: [N, 3, C] gradient of the final states, or None for zeros.

    Returns:
        Gradients of k, v, log_decay, bonus and the initial state; the last is empty where that is
        None.
    """

    dout: Annotated[Tensor, Rows("C")]
    dfinal_state: Annotated[Tensor | None, Dense("num_offsets - 1", "3", "C", dtype="work")]


wkv_forward, wkv_backward = define_pair(
    WkvForward,
    FORWARD,
    WkvBackward,
    BACKWARD,
    cpp=Cpp("num_offsets-1=num_seqs C=num_channels"),
)
