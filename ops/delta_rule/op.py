"""Delta rules over ragged sequences, their states updated in place by slot.

Implementations ``recurrent_*`` walk token by token and are meant for decode; ``chunk_*`` turn each
chunk into matrix products. In the gated delta rule a head has one decay, in Kimi delta attention
one for each channel of its keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import Capability, Implementation
from torch_hybrid.ops.core.declare import Cpp, Index, OneOf, Pool, Rows, StatefulOp, define, like
from torch_hybrid.ops.core.recurrence import CHUNK_SIZES, DEFAULT_CHUNK_SIZE, in_forms
from torch_hybrid.ops.core.registration import check_groups
from torch_hybrid.ops.flashinfer.library import HOPPER, flashinfer_missing
from torch_hybrid.ops.implementations import CUDA, HALVES, INVARIANT, in_cpp, in_torch, in_triton

_FOLDER = "torch_hybrid.ops.delta_rule"
_PLANNER = f"{_FOLDER}._triton_scan:plan"
_TRITON_BY_TOKEN = in_triton(
    f"{_FOLDER}._triton:recurrent_delta_rule", limits={"head_k_dim": 512}, features=INVARIANT
)
_TORCH_BY_TOKEN = in_torch(f"{_FOLDER}._torch:recurrent_delta_rule")
_TORCH_BY_CHUNK = in_torch(f"{_FOLDER}._torch:chunk_delta_rule")


def _triton_chunk(launcher: str, *, limit: int) -> dict[str, Implementation]:
    """Make both implementations by a launcher: with states rounded to float16, and exact."""
    exact = in_triton(launcher, limits={"head_k_dim": limit}, planner=_PLANNER)
    rounded = replace(
        exact,
        capability=replace(
            exact.capability,
            devices=CUDA,
            dtypes=frozenset({torch.bfloat16}),
            limits={"head_k_dim": 128},
            exact=False,
        ),
        options={"is_exact": False},
    )
    return {"triton_rounded": rounded, "triton": exact}


_FLASHINFER_BY_CHUNK = Implementation(
    capability=Capability(
        devices=CUDA,
        dtypes=HALVES,
        one_of={"head_k_dim": (128,), "head_v_dim": (128,)},
        cuda_graph=True,
        available=flashinfer_missing(capabilities=HOPPER, cutlass_dsl=True),
    ),
    launcher=f"{_FOLDER}._flashinfer:chunk_gated_delta_rule",
    planner=f"{_FOLDER}._flashinfer:plan",
    by_name="its states are good to 16 bits, those of the others to float32",
)
GATED_IMPLEMENTATIONS = in_forms(
    recurrent={
        "cpp": in_cpp(f"{_FOLDER}._cpu_gated.cpp:gated_delta_rule", features=INVARIANT),
        "triton": _TRITON_BY_TOKEN,
        "torch": _TORCH_BY_TOKEN,
    },
    chunk={
        "cpp": in_cpp(f"{_FOLDER}._cpu_gated.cpp:gated_delta_rule"),
        **_triton_chunk(f"{_FOLDER}._triton_gated:chunk_gated_delta_rule", limit=256),
        "flashinfer": _FLASHINFER_BY_CHUNK,
        "torch": _TORCH_BY_CHUNK,
    },
)
KIMI_IMPLEMENTATIONS = in_forms(
    recurrent={
        "cpp": in_cpp(f"{_FOLDER}._cpu_kimi.cpp:kimi_delta_attention"),
        "triton": _TRITON_BY_TOKEN,
        "torch": _TORCH_BY_TOKEN,
    },
    chunk={
        "cpp": in_cpp(f"{_FOLDER}._cpu_kimi.cpp:kimi_delta_attention"),
        **_triton_chunk(f"{_FOLDER}._triton_kimi:chunk_kimi_delta_attention", limit=128),
        "torch": _TORCH_BY_CHUNK,
    },
)


@dataclass(slots=True, repr=False, eq=False)
class DeltaRule(StatefulOp):
    """Arguments that both rules have.

    Args:
        q: [T, H, K] queries, the sequences packed one after the other. Float dtype; rows may lie
            any distance apart (a slice of a projection), one row is contiguous; so for k and v.
        k: [T, H, K] keys, in q's dtype.
        scale: factor on q, usually ``K ** -0.5``.
        qk_l2norm: scale each q and k to unit length first, by ``rsqrt(sum x^2 + 1e-6)``.
        impl: a name among the implementations: "recurrent_..." walks by token, "chunk_..." by
            chunk.
        chunk_size: tokens per chunk, 16, 32, 64 or 128; changes speed and rounding only. Walks
            by token ignore it; "chunk_triton" takes chunks of its own.
    """

    q: Annotated[Tensor, Rows("H", "K")]
    k: Annotated[Tensor, Rows("H", "K", counts=False)]
    v: Annotated[Tensor, Rows("HV", "V")]
    g: Annotated[Tensor, Rows("...")]  # [T, HV], or [T, HV, K] where channels decay on their own
    beta: Annotated[Tensor, Rows("HV", dtype=torch.float32)]
    state: Annotated[Tensor, Pool("HV", "V", "K", dtype=torch.float32)]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    initial_indices: Annotated[Tensor, Index("N")]
    state_indices: Annotated[Tensor, Index("N", counts=True)]
    scale: float = field(kw_only=True)
    qk_l2norm: bool = field(kw_only=True)
    chunk_size: Annotated[int, OneOf(*CHUNK_SIZES)] = field(
        default=DEFAULT_CHUNK_SIZE, kw_only=True
    )
    planned: Sequence[Tensor] | None = field(default=(), kw_only=True)

    @property
    def by_channel(self) -> bool:
        """True where each channel of a key has a decay of its own."""
        return self.g.ndim == 3


@dataclass(slots=True, repr=False, eq=False)
class GatedDeltaRule(DeltaRule):
    """Gated delta rule, which advances the state of every sequence.

    Per value head: ``S = e^g S; u = beta (v - S k); S = S + u k^T; o = scale S q``. Value head
    ``j`` reads key head ``j // (HV // H)``. All arithmetic is float32.

    Chunks are counted from the first token of each sequence in this call, so the result for a
    sequence does not depend on its neighbours.

    Args:
        v: [T, HV, V] values, in q's dtype; HV is a multiple of H.
        g: [T, HV] float32 natural-log decay, at most 0.
        beta: [T, HV] float32 step size, in [0, 1], or [0, 2] with negative eigenvalues.
        state: [S, HV, V, K] float32 pool. **Mutated**: slot ``state_indices[n]`` receives the
            state after the last token of sequence n; no other slot is written.

    Returns:
        [T, HV, V] outputs in v's dtype; rows of padding tokens are exactly 0.

    From "Gated Delta Networks" (arXiv 2412.06464), as used by Qwen3-Next.
    """

    g: Annotated[Tensor, Rows("HV", dtype=torch.float32)]

    def check(self) -> None:
        """Raise ValueError unless key heads divide the value heads."""
        check_groups("v must have", self.v.shape[1], self.k.shape[1], "heads of k")


@dataclass(slots=True, repr=False, eq=False)
class KimiDeltaAttention(DeltaRule):
    """Kimi delta attention, which advances the state of every sequence.

    Per head: ``S = S diag(e^g); u = beta (v - S k); S = S + u k^T; o = scale S q``. All
    arithmetic is float32. How g comes about (softplus, or bounded from below) is the layer's
    matter: any g up to 0 is exact, -inf (forget the channel) included.

    Chunks are counted from the first token of each sequence in this call, so the result for a
    sequence does not depend on its neighbours.

    Args:
        v: [T, H, V] values, in q's dtype.
        g: [T, H, K] float32 natural-log decay of each channel, at most 0; rows as for q.
        beta: [T, H] float32 step size, in [0, 1].
        state: [S, H, V, K] float32 pool. **Mutated**: slot ``state_indices[n]`` receives the
            state after the last token of sequence n; no other slot is written.

    Returns:
        [T, H, V] outputs in v's dtype; rows of padding tokens are exactly 0.

    From "Kimi Linear" (arXiv 2510.26692); also the linear layers of Ling-3.
    """

    v: Annotated[Tensor, Rows("H", "V")]
    g: Annotated[Tensor, Rows("H", "K", dtype=torch.float32)]
    beta: Annotated[Tensor, Rows("H", dtype=torch.float32)]
    state: Annotated[Tensor, Pool("H", "V", "K", dtype=torch.float32)]


_CPP_SIZES = "H=num_k_heads K=k_dim V=v_dim"
_CPP_VALUES = {
    "num_v_heads": "x.v.shape[1]",
    "chunk_size": "x.chunk_size if x.impl == 'chunk_cpp' else 0",  # 0: walk by token
}
gated_delta_rule = define(
    GatedDeltaRule,
    GATED_IMPLEMENTATIONS,
    returns=like("v"),
    limited={"head_k_dim": "K", "head_v_dim": "V"},
    flops="6 * T * HV * V * K",
    cpp=Cpp(_CPP_SIZES, _CPP_VALUES),
)
kimi_delta_attention = define(
    KimiDeltaAttention,
    KIMI_IMPLEMENTATIONS,
    returns=like("v"),
    limited={"head_k_dim": "K"},
    flops="6 * T * H * V * K",
    cpp=Cpp(_CPP_SIZES, _CPP_VALUES),
)
