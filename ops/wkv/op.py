"""wkv, RWKV's weighted average of past values: its declaration and its implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64
from torch_hybrid.ops.core.declare import Cpp, Dense, Index, Pool, Rows, StatefulOp, define, like
from torch_hybrid.ops.implementations import INVARIANT, in_cpp, in_torch, in_triton, invariant

# The exponent of a state of nothing: sums have no part of it, whatever they decay by.
NOTHING = -1e38

_TRITON = in_triton("torch_hybrid.ops.wkv._triton:wkv")
IMPLEMENTATIONS = {
    "cpp": in_cpp("torch_hybrid.ops.wkv._cpu.cpp:wkv", features=INVARIANT),
    "triton": _TRITON,
    "triton_invariant": invariant(_TRITON),
    "torch": in_torch("torch_hybrid.ops.wkv._torch:wkv", dtypes=FLOATS_AND_FLOAT64),
}


@dataclass(slots=True, repr=False, eq=False)
class Wkv(StatefulOp):
    """Mean of a channel's values so far, each weighted by its key and by its age.

        out         = (numerator + e^(bonus + k) v) / (denominator + e^(bonus + k))
        numerator   = e^log_decay numerator + e^k v             of each channel
        denominator = e^log_decay denominator + e^k

    Both sums are kept divided by e^exponent, of the largest exponent in them, so that none of them
    overflows. Arithmetic is float32, of float64 tensors float64.

    Args:
        k: [T, C] logarithms of weights, the sequences packed one after the other. Float dtype; rows
            may lie any distance apart (a slice of a projection), one row is contiguous.
        v: [T, C] values, like ``k``.
        log_decay: [C] float32, what a token takes from the logarithms of all weights before it;
            0 at most.
        bonus: [C] float32, what a token's own weight has more in the token's own output.
        state: [S, 3, C] float32 pool: numerator, denominator, exponent. **Mutated**: slot
            ``state_indices[n]`` receives the state after the last token of sequence n; no other
            slot is written.
        initial_indices: [N] int32 slot that each sequence starts from; 0, the null slot: from
            nothing. Several may start from one slot, which no other one may then write.

    Returns:
        [T, C] means in k's dtype; rows of padding tokens are exactly 0.

    "RWKV" (arXiv 2305.13048), as in RWKV-4.
    """

    k: Annotated[Tensor, Rows("C")]
    v: Annotated[Tensor, Rows("C")]
    log_decay: Annotated[Tensor, Dense("C", dtype=torch.float32)]
    bonus: Annotated[Tensor, Dense("C", dtype=torch.float32)]
    state: Annotated[Tensor, Pool("3", "C", dtype=torch.float32)]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    initial_indices: Annotated[Tensor, Index("N")]
    state_indices: Annotated[Tensor, Index("N", counts=True)]


wkv = define(Wkv, IMPLEMENTATIONS, returns=like("k"), cpp=Cpp("C=num_channels"))
