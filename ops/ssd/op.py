"""Linear attention with a scalar decay over ragged sequences, its state updated in place by slot.

Implementations ``recurrent_*`` walk token by token and are meant for decode; ``chunk_*`` turn each
chunk into matrix products. Both serve Mamba2, lightning attention and mLSTM, which differ in their
arguments alone; see README.md.
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

_FOLDER = "torch_hybrid.ops.ssd"
TRAINED = "trained"  # form of forwards that a backward goes through: by chunks

IMPLEMENTATIONS = in_forms(
    recurrent={
        "cpp": in_cpp(f"{_FOLDER}._cpu_scan.cpp:ssd", features=INVARIANT),
        "triton": in_triton(
            f"{_FOLDER}._triton:recurrent_ssd", limits={"head_k_dim": 512}, features=INVARIANT
        ),
        "torch": in_torch(f"{_FOLDER}._torch:recurrent_ssd"),
    },
    chunk={
        "cpp": in_cpp(f"{_FOLDER}._cpu_scan.cpp:ssd"),
        "triton": in_triton(f"{_FOLDER}._triton_chunk:chunk_ssd", limits={"head_k_dim": 256}),
        "torch": in_torch(f"{_FOLDER}._torch:chunk_ssd"),
    },
)


@dataclass(slots=True, repr=False, eq=False)
class Ssd(StatefulOp):
    """Linear attention with a scalar decay, which advances the state of every sequence.

    Per head: ``S = e^g S + (dt v) k^T; o = scale S q + D v``, so that a token reads itself,
    undecayed. Head ``h`` reads group ``h // (H // G)`` of q and k. All arithmetic is float32.

    Chunks are counted from the first token of each sequence in this call, so the result for a
    sequence does not depend on its neighbours.

    Args:
        q: [T, G, K] queries (Mamba2's C), the sequences packed one after the other. Float dtype;
            rows may lie any distance apart (a slice of a projection), one row is contiguous; so
            for k, v, g and dt.
        k: [T, G, K] keys (Mamba2's B), in q's dtype.
        v: [T, H, V] values (Mamba2's x), in q's dtype; H is a multiple of G.
        g: [T, H] float32 natural-log decay, at most 0: Mamba2's ``dt * A``, or minus the slope
            of a head of lightning attention, one row expanded to all tokens.
        dt: [T, H] float32 weight of each token in the state, mLSTM's exponential input gate; None
            is 1.
        D: [H] float32 weight of each token in its own output besides; None is 0.
        state: [S, H, V, K] float32 pool. **Mutated**: slot ``state_indices[n]`` receives the
            state after the last token of sequence n; no other slot is written.
        scale: factor on q: 1 in Mamba2 and MiniMax-01, ``K ** -0.5`` in Ring-2.5 and mLSTM.
        impl: a name in IMPLEMENTATIONS: "recurrent_..." walks by token, "chunk_..." by chunk.
        chunk_size: tokens per chunk, 16, 32, 64 or 128; changes speed and rounding only. Walks
            by token ignore it; "chunk_triton" takes chunks of its own.

    Returns:
        [T, H, V] outputs in v's dtype; rows of padding tokens are exactly 0.

    From "Transformers are SSMs" (Mamba2, arXiv 2405.21060), "Lightning Attention-2"
    (arXiv 2401.04658) and "xLSTM" (mLSTM, arXiv 2405.04517).
    """

    q: Annotated[Tensor, Rows("G", "K")]
    k: Annotated[Tensor, Rows("G", "K")]
    v: Annotated[Tensor, Rows("H", "V")]
    g: Annotated[Tensor, Rows("H", dtype=torch.float32)]
    dt: Annotated[Tensor | None, Rows("H", dtype=torch.float32)]
    D: Annotated[Tensor | None, Dense("H", dtype=torch.float32)]
    state: Annotated[Tensor, Pool("H", "V", "K", dtype=torch.float32)]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    initial_indices: Annotated[Tensor, Index("N")]
    state_indices: Annotated[Tensor, Index("N", counts=True)]
    scale: float = field(kw_only=True)
    chunk_size: Annotated[int, OneOf(*CHUNK_SIZES)] = field(
        default=DEFAULT_CHUNK_SIZE, kw_only=True
    )

    def check(self) -> None:
        """Raise ValueError unless groups divide the heads."""
        check_groups("v must have", self.v.shape[1], self.k.shape[1], "heads of k")


ssd = define(
    Ssd,
    IMPLEMENTATIONS,
    returns=like("v"),
    limited={"head_k_dim": "K"},
    flops="4 * T * H * V * K",
    cpp=Cpp(
        "G=num_k_heads H=num_v_heads K=k_dim V=v_dim",
        {
            "chunk_size": "0 if x.impl == 'recurrent_cpp' else x.chunk_size",  # 0: walk by token
            "sums_decays": f"x.impl == '{TRAINED}_cpp'",
        },
    ),
)
