"""Real-gated linear recurrent units without pools: states go in and come out.

The forward runs the kernels of ``rg_lru`` on a pool of its own. The backward is an op of its own,
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
from torch_hybrid.ops.rg_lru.op import IMPLEMENTATIONS, RgLru, check_gates

# Largest derivative of a square root that the published models train with.
MAX_SQRT_GRADIENT = 1000.0

_FOLDER = "torch_hybrid.ops.rg_lru.training"
FORWARD = by_pool(
    {
        "cpp": IMPLEMENTATIONS["cpp"],
        "triton": cut(IMPLEMENTATIONS["triton"]),
        "torch": IMPLEMENTATIONS["torch"],
    }
)
BACKWARD: dict[str, Implementation] = {
    "cpp": in_cpp(f"{_FOLDER}._cpu.cpp:rg_lru_backward"),
    "triton": in_triton(f"{_FOLDER}._triton:rg_lru_backward"),
    "torch": in_torch(f"{_FOLDER}._torch:rg_lru_backward", dtypes=FLOATS_AND_FLOAT64),
}


@dataclass(slots=True, repr=False, eq=False)
class TrainedRgLru(PackedOp):
    """Real-gated linear recurrent units without a pool; ``torch_hybrid.functional`` states them.

    Args:
        x: [T, C], float dtype. gates [T, H, 2 C / H] in that dtype.
        log_a: [C] float32, or float64 beside float64.
        initial_state: [N, C] like log_a, or None: all sequences start from nothing.

    Returns:
        [T, C] outputs in x's dtype, and final states like initial ones, or [0, C].
    """

    like: ClassVar[str] = "x"

    x: Annotated[Tensor, Rows("C")]
    gates: Annotated[Tensor, Rows("H", "G", apart=2)]
    log_a: Annotated[Tensor, Dense("C", dtype="work")]
    cu_seqlens: Annotated[Tensor, Index("num_offsets", counts=True)]
    initial_state: Annotated[Tensor | None, Dense("num_offsets - 1", "C", dtype="work")]

    def check(self) -> None:
        """Raise ValueError unless heads divide the channels, and gates are two a channel."""
        check_gates(self.x, self.gates)

    def on_pool(self, pool: Tensor, initial: Tensor, final: Tensor) -> RgLru:
        """Give the arguments of the op with a pool."""
        given = (self.x, self.gates, self.log_a, pool, self.cu_seqlens, initial, final)
        return RgLru(*given, impl=self.impl)


rg_lru_forward, rg_lru_backward = define_pair(
    TrainedRgLru,
    FORWARD,
    BACKWARD,
    cpp=Cpp(
        "num_offsets-1=num_seqs H=num_heads G//2=head_dim",
        {"max_sqrt_gradient": str(MAX_SQRT_GRADIENT)},
    ),
)
