"""The selective scan without pools: states go in and come out.

The forward runs the kernels of the chunk form of ``selective_scan`` on a pool of its own. The
backward is an op of its own, which is given what the forward was given: states are recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64, Implementation
from torch_hybrid.ops.core.declare import Cpp, Dense, Index, Rows
from torch_hybrid.ops.core.packed import PackedOp, by_pool, define_pair
from torch_hybrid.ops.core.recurrence import CHUNK
from torch_hybrid.ops.core.registration import check_groups
from torch_hybrid.ops.implementations import CPP_DTYPES, in_cpp, in_torch, in_triton
from torch_hybrid.ops.selective_scan.op import IMPLEMENTATIONS, SelectiveScan

_FOLDER = "torch_hybrid.ops.selective_scan.training"
BACKWARD: dict[str, Implementation] = {
    "cpp": in_cpp(f"{_FOLDER}._cpu.cpp:selective_scan_backward"),
    "triton": in_triton(
        f"{_FOLDER}._triton:selective_scan_backward", dtypes=CPP_DTYPES, limits={"state_dim": 256}
    ),
    "torch": in_torch(f"{_FOLDER}._torch:selective_scan_backward", dtypes=FLOATS_AND_FLOAT64),
}


_TRITON = IMPLEMENTATIONS[f"{CHUNK}_triton"]
FORWARD = by_pool(
    {
        "cpp": IMPLEMENTATIONS[f"{CHUNK}_cpp"],
        # Where a sequence is cut must not go by other sequences.
        "triton": replace(_TRITON, options={**_TRITON.options, "fewest_segments": 1}),
        "torch": IMPLEMENTATIONS[f"{CHUNK}_torch"],
    },
    torch_serves=BACKWARD["torch"].capability,
)


@dataclass(slots=True, repr=False, eq=False)
class TrainedSelectiveScan(PackedOp):
    """Selective scan without a pool; ``torch_hybrid.functional`` states it.

    Args:
        x, dt: [T, E], float dtype.
        A: [E, M] rates of decay, at most 0, float32, or float64 beside float64.
        B, C: [T, G, M] in x's dtype.
        D: [E] weight of each input in its own output, like A, or None for 0.
        z: [T, E] gate of the outputs in x's dtype; None: they are not gated.
        dt_bias: [E] bias of the step sizes, like A, or None for 0.
        initial_state: [N, E, M] like A, or None for zeros.

    Returns:
        [T, E] outputs in x's dtype, and final states like initial ones, or [0, E, M].
    """

    like: ClassVar[str] = "x"

    x: Annotated[Tensor, Rows("E")]
    dt: Annotated[Tensor, Rows("E")]
    A: Annotated[Tensor, Dense("E", "M", dtype="work")]
    B: Annotated[Tensor, Rows("G", "M", counts="G")]
    C: Annotated[Tensor, Rows("G", "M", counts=False)]
    D: Annotated[Tensor | None, Dense("E", dtype="work")]
    z: Annotated[Tensor | None, Rows("E")]
    dt_bias: Annotated[Tensor | None, Dense("E", dtype="work")]
    cu_seqlens: Annotated[Tensor, Index("num_offsets", counts=True)]
    initial_state: Annotated[Tensor | None, Dense("num_offsets - 1", "E", "M", dtype="work")]

    def check(self) -> None:
        """Raise ValueError unless groups divide the channels."""
        check_groups("x must have", self.x.shape[1], self.B.shape[1], "groups of B")

    def on_pool(self, pool: Tensor, initial: Tensor, final: Tensor) -> SelectiveScan:
        """Give the arguments of the op with a pool."""
        D = torch.zeros_like(self.A[:, 0]) if self.D is None else self.D
        rows = (self.x, self.dt, self.B, self.C, self.z)
        slots, impl = (self.cu_seqlens, initial, final), f"{CHUNK}_{self.impl}"
        weights = ((-self.A).log(), D)
        return SelectiveScan(*rows, *weights, pool, *slots, dt_bias=self.dt_bias, impl=impl)


selective_scan_forward, selective_scan_backward = define_pair(
    TrainedSelectiveScan,
    FORWARD,
    BACKWARD,
    cpp=Cpp("num_offsets-1=num_seqs E=channels G=num_groups M=state_dim"),
    limited={"state_dim": "M"},
    flops=("4 * T * E * M", "12 * T * E * M"),
)
