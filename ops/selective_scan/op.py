"""Mamba's selective scan over ragged sequences, its state updated in place by slot.

Implementations ``recurrent_*`` walk token by token and are meant for decode; ``chunk_*`` may walk
parts of a sequence side by side. The op takes the step sizes before their bias and softplus, and
gates what it reads: between the projections that make its inputs and the one that takes its
outputs, it is all that a mixer does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.core.declare import (
    Cpp,
    Dense,
    Index,
    OneOf,
    Pool,
    Rows,
    StatefulOp,
    define,
    like,
)
from torch_hybrid.ops.core.recurrence import CHUNK_SIZES, DEFAULT_CHUNK_SIZE, in_forms
from torch_hybrid.ops.core.registration import check_groups
from torch_hybrid.ops.implementations import INVARIANT, in_cpp, in_torch, in_triton

_FOLDER = "torch_hybrid.ops.selective_scan"
_LIMITS = {"state_dim": 256}

IMPLEMENTATIONS = in_forms(
    recurrent={
        "cpp": in_cpp(f"{_FOLDER}._cpu.cpp:selective_scan", features=INVARIANT),
        "triton": in_triton(
            f"{_FOLDER}._triton:selective_scan", limits=_LIMITS, features=INVARIANT
        ),
        "torch": in_torch(f"{_FOLDER}._torch:recurrent_selective_scan"),
    },
    chunk={
        "cpp": in_cpp(f"{_FOLDER}._cpu.cpp:selective_scan"),
        "triton": in_triton(
            f"{_FOLDER}._triton:selective_scan", limits=_LIMITS, options={"is_chunked": True}
        ),
        "torch": in_torch(f"{_FOLDER}._torch:chunk_selective_scan"),
    },
)


@dataclass(slots=True, repr=False, eq=False)
class SelectiveScan(StatefulOp):
    """Selective scan, which advances the state of every sequence.

    Per channel and state, with a step size of each channel:

        step = softplus(dt + dt_bias)
        S = exp(-exp(A_log) step) S + step x B
        out = (sum of S C over the states + D x) silu(z)

    so that a token reads itself, undecayed. Channel ``c`` reads group ``c // (channels // G)`` of B
    and C. All arithmetic is float32, rounded once at the end.

    Args:
        x: [T, channels] inputs, the sequences packed one after the other. Float dtype; rows may lie
            any distance apart (a slice of a projection), one row is contiguous; so for dt, B, C
            and z, which have its dtype.
        dt: [T, channels] step sizes before their bias and their softplus.
        B: [T, G, N] by what inputs enter each of the N states of a channel; G divides the channels.
        C: [T, G, N] by what the states are read.
        z: [T, channels] gate of the output; None: it is not gated.
        A_log: [channels, N] logarithm of the rate at which each state decays, in x's dtype or in
            float32.
        D: [channels] weight of each input in its own output besides, in x's dtype or in float32.
        state: [S, channels, N] float32 pool. **Mutated**: slot ``state_indices[n]`` receives the
            state after the last token of sequence n; no other slot is written.
        dt_bias: [channels] what is added to each channel's step sizes, in x's dtype or in float32;
            None: nothing.
        impl: a name in IMPLEMENTATIONS: "recurrent_..." walks by token, "chunk_..." walks parts of
            a sequence side by side where that pays.
        chunk_size: tokens that "chunk_torch" takes as a part, 16, 32, 64 or 128; changes speed and
            rounding only. "chunk_cpp" has channels enough to walk all parts one after the other,
            "chunk_triton" takes parts of its own.

    Returns:
        [T, channels] in x's dtype; rows of padding tokens are exactly 0.

    From "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (arXiv 2312.00752).
    """

    x: Annotated[Tensor, Rows("E")]
    dt: Annotated[Tensor, Rows("E")]
    B: Annotated[Tensor, Rows("G", "M", counts="G")]
    C: Annotated[Tensor, Rows("G", "M", counts=False)]
    z: Annotated[Tensor | None, Rows("E")]
    A_log: Annotated[Tensor, Dense("E", "M", or_float32=True)]
    D: Annotated[Tensor, Dense("E", or_float32=True)]
    state: Annotated[Tensor, Pool("E", "M", dtype=torch.float32)]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    initial_indices: Annotated[Tensor, Index("N")]
    state_indices: Annotated[Tensor, Index("N", counts=True)]
    dt_bias: Annotated[Tensor | None, Dense("E", or_float32=True)] = field(
        default=None, kw_only=True
    )
    chunk_size: Annotated[int, OneOf(*CHUNK_SIZES)] = field(
        default=DEFAULT_CHUNK_SIZE, kw_only=True
    )

    def check(self) -> None:
        """Raise ValueError unless groups divide the channels."""
        check_groups("x must have", self.x.shape[1], self.B.shape[1], "groups of B")


selective_scan = define(
    SelectiveScan,
    IMPLEMENTATIONS,
    returns=like("x"),
    limited={"state_dim": "M"},
    flops="4 * T * E * M",
    cpp=Cpp("E=channels G=num_groups M=state_dim"),
)
