"""rg_lru, real-gated linear recurrent units: its declaration and its implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64
from torch_hybrid.ops.core.declare import Cpp, Dense, Index, Pool, Rows, StatefulOp, define, like
from torch_hybrid.ops.core.registration import check_shapes
from torch_hybrid.ops.implementations import INVARIANT, in_cpp, in_torch, in_triton, invariant

_TRITON = in_triton("torch_hybrid.ops.rg_lru._triton:rg_lru")
IMPLEMENTATIONS = {
    "cpp": in_cpp("torch_hybrid.ops.rg_lru._cpu.cpp:rg_lru", features=INVARIANT),
    "triton": _TRITON,
    "triton_invariant": invariant(_TRITON),
    "torch": in_torch("torch_hybrid.ops.rg_lru._torch:rg_lru", dtypes=FLOATS_AND_FLOAT64),
}


@dataclass(slots=True, repr=False, eq=False)
class RgLru(StatefulOp):
    """State of one number per channel, after each token that advances it.

        i, r = sigmoid(gates)                  of each channel
        log_decay = r log_a
        h = exp(log_decay) h + sqrt(1 - exp(2 log_decay)) i x

    The first token of a sequence that starts from nothing is not scaled: ``h = i x``. Arithmetic is
    float32, of float64 tensors float64.

    Args:
        x: [T, C] inputs, the sequences packed one after the other. Float dtype; rows may lie any
            distance apart (a slice of a projection), one row is contiguous.
        gates: [T, H, 2 C / H] what the gates are before their sigmoid, in x's dtype: for each head
            those of its channels' inputs, then those of their recurrence. Tokens and heads may lie
            any distance apart, as a product for each head gives them.
        log_a: [C] float32 natural logarithm of a channel's decay where its gate is 1; 0 at most.
        state: [S, C] float32 pool. **Mutated**: slot ``state_indices[n]`` receives the state after
            the last token of sequence n; no other slot is written.

    Returns:
        [T, C] states after each token in x's dtype; rows of padding tokens are exactly 0.

    "Griffin" (arXiv 2402.19427), as in RecurrentGemma.
    """

    x: Annotated[Tensor, Rows("C")]
    gates: Annotated[Tensor, Rows("H", "G", apart=2)]
    log_a: Annotated[Tensor, Dense("C", dtype=torch.float32)]
    state: Annotated[Tensor, Pool("C", dtype=torch.float32)]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    initial_indices: Annotated[Tensor, Index("N")]
    state_indices: Annotated[Tensor, Index("N", counts=True)]

    def check(self) -> None:
        """Raise ValueError unless heads divide the channels, and gates are two a channel."""
        check_gates(self.x, self.gates)


def check_gates(x: Tensor, gates: Tensor) -> None:
    """Raise ValueError unless heads divide the channels of x, and gates are two a channel."""
    (num_tokens, channels), num_heads = x.shape, gates.shape[1]
    if num_heads < 1 or channels % num_heads:
        raise ValueError(f"gates must have heads that divide {channels} channels, got {num_heads}")
    check_shapes({"gates": (gates, (num_tokens, num_heads, 2 * channels // num_heads))})


rg_lru = define(RgLru, IMPLEMENTATIONS, returns=like("x"), cpp=Cpp("H=num_heads G//2=head_dim"))
