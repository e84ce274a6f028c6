"""Linear attention with a scalar decay without pools: states go in and come out.

The forward runs the kernels of the chunk form of ``ssd`` on a pool of its own. The backward is an
op of its own, which is given what the forward was given: states at the starts of chunks are
recomputed. Mamba2, lightning attention and mLSTM differ in their arguments alone, as in ``ssd``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64, Implementation
from torch_hybrid.ops.core.declare import Cpp, Dense, Index, Rows
from torch_hybrid.ops.core.packed import PackedOp, by_pool, define_pair
from torch_hybrid.ops.core.recurrence import CHUNK, DEFAULT_CHUNK_SIZE
from torch_hybrid.ops.core.registration import check_groups
from torch_hybrid.ops.implementations import CPP_DTYPES, in_cpp, in_torch, in_triton
from torch_hybrid.ops.ssd.op import IMPLEMENTATIONS, TRAINED, Ssd

_FOLDER = "torch_hybrid.ops.ssd.training"
BACKWARD: dict[str, Implementation] = {
    "cpp": in_cpp(f"{_FOLDER}._cpu.cpp:ssd_backward"),
    "triton": in_triton(
        f"{_FOLDER}._triton:ssd_backward", dtypes=CPP_DTYPES, limits={"head_k_dim": 256}
    ),
    "torch": in_torch(f"{_FOLDER}._torch:ssd_backward", dtypes=FLOATS_AND_FLOAT64),
}
FORWARD = by_pool(
    {
        "cpp": IMPLEMENTATIONS[f"{CHUNK}_cpp"],
        "triton": IMPLEMENTATIONS[f"{CHUNK}_triton"],
        "torch": IMPLEMENTATIONS[f"{CHUNK}_torch"],
    },
    torch_serves=BACKWARD["torch"].capability,
)


@dataclass(slots=True, repr=False, eq=False)
class TrainedSsd(PackedOp):
    """Linear attention with a scalar decay by chunks, without a pool.

    Args:
        q, k: [T, G, K], float dtype. v: [T, H, V] in that dtype.
        g: [T, H] natural-log decay, float32, or float64 beside float64.
        dt: [T, H] weight of each token in the state, like g, or None for 1.
        D: [H] weight of each token in its own output, like g, or None for 0.
        initial_state: [N, H, V, K] like g, or None for zeros.
        scale: factor on q.

    Returns:
        [T, H, V] outputs in v's dtype, and final states like initial ones, or [0, H, V, K].
    """

    like: ClassVar[str] = "v"

    q: Annotated[Tensor, Rows("G", "K")]
    k: Annotated[Tensor, Rows("G", "K", counts=False)]
    v: Annotated[Tensor, Rows("H", "V")]
    g: Annotated[Tensor, Rows("H", dtype="work")]
    dt: Annotated[Tensor | None, Rows("H", dtype="work")]
    D: Annotated[Tensor | None, Dense("H", dtype="work")]
    cu_seqlens: Annotated[Tensor, Index("num_offsets", counts=True)]
    initial_state: Annotated[Tensor | None, Dense("num_offsets - 1", "H", "V", "K", dtype="work")]
    scale: float = field(kw_only=True)

    def check(self) -> None:
        """Raise ValueError unless groups divide the heads."""
        check_groups("v must have", self.v.shape[1], self.k.shape[1], "heads of k")

    def on_pool(self, pool: Tensor, initial: Tensor, final: Tensor) -> Ssd:
        """Give the arguments of the op with a pool."""
        given = (self.q, self.k, self.v, self.g, self.dt, self.D, pool, self.cu_seqlens)
        return Ssd(*given, initial, final, scale=self.scale, impl=f"{TRAINED}_{self.impl}")


ssd_forward, ssd_backward = define_pair(
    TrainedSsd,
    FORWARD,
    BACKWARD,
    cpp=Cpp(
        "num_offsets-1=num_seqs G=num_k_heads H=num_v_heads K=k_dim V=v_dim",
        {"chunk_size": str(DEFAULT_CHUNK_SIZE)},
    ),
    limited={"head_k_dim": "K"},
    flops=("4 * T * H * V * K", "12 * T * H * V * K"),
)
