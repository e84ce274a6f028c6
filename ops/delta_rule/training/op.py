"""Delta rules without pools: initial states go in, final states come out, nothing is mutated.

A forward runs the kernels of the chunk form on a pool of its own. A backward is an op of its own,
which is given what the forward was given: states at the starts of chunks are recomputed, as they
are larger than all other tensors of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64, Implementation
from torch_hybrid.ops.core.declare import Cpp, Dense, Index, Rows
from torch_hybrid.ops.core.packed import PackedOp, by_pool, define_pair
from torch_hybrid.ops.core.recurrence import CHUNK, DEFAULT_CHUNK_SIZE
from torch_hybrid.ops.core.registration import check_groups, check_shapes
from torch_hybrid.ops.delta_rule.op import (
    GATED_IMPLEMENTATIONS,
    KIMI_IMPLEMENTATIONS,
    DeltaRule,
    GatedDeltaRule,
    KimiDeltaAttention,
)
from torch_hybrid.ops.implementations import CPP_DTYPES, in_cpp, in_torch, in_triton
from torch_hybrid.ops.triton.devices import triton_missing

_FOLDER = "torch_hybrid.ops.delta_rule.training"
_TORCH = in_torch(f"{_FOLDER}._torch:delta_rule_backward", dtypes=FLOATS_AND_FLOAT64)


def _by_chunks(known: Mapping[str, Implementation]) -> dict[str, Implementation]:
    """Make the forward's implementations of those of the chunk form.

    Beside bfloat16, states rounded to float16 add nothing to the error of gradients.
    """
    names = ("cpp", "triton_rounded", "triton", "torch")
    chunk_forms = {name: known[f"{CHUNK}_{name}"] for name in names}
    return by_pool(chunk_forms, torch_serves=_TORCH.capability)


GATED_FORWARD = _by_chunks(GATED_IMPLEMENTATIONS)
KIMI_FORWARD = _by_chunks(KIMI_IMPLEMENTATIONS)


def _gated_backward_missing() -> str | None:
    """Say why Triton's backward of the gated rule cannot be used here; None when it can."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10:
        return "Triton 3.7.1 fails to compile it for this GPU"
    return triton_missing()


_in_triton = partial(in_triton, dtypes=CPP_DTYPES, limits={"head_k_dim": 256})
GATED_BACKWARD: dict[str, Implementation] = {
    "cpp": in_cpp(f"{_FOLDER}._cpu_gated.cpp:gated_delta_rule_backward"),
    "triton": _in_triton(
        f"{_FOLDER}._triton_gated:gated_delta_rule_backward", available=_gated_backward_missing
    ),
    "torch": _TORCH,
}
KIMI_BACKWARD: dict[str, Implementation] = {
    "cpp": in_cpp(f"{_FOLDER}._cpu_kimi.cpp:kimi_delta_attention_backward"),
    "triton": _in_triton(f"{_FOLDER}._triton_kimi:kimi_delta_attention_backward"),
    "torch": _TORCH,
}


@dataclass(slots=True, repr=False, eq=False)
class TrainedDeltaRule(PackedOp):
    """Arguments that both rules have.

    Attributes:
        pooled: arguments of the rule's op with a pool.
    """

    like: ClassVar[str] = "v"
    pooled: ClassVar[type[DeltaRule]]

    q: Annotated[Tensor, Rows("H", "K")]
    k: Annotated[Tensor, Rows("H", "K", counts=False)]
    v: Annotated[Tensor, Rows("HV", "V")]
    g: Annotated[Tensor, Rows("...")]  # [T, HV], or [T, HV, K] where channels decay on their own
    beta: Annotated[Tensor, Rows("HV", dtype="work")]
    cu_seqlens: Annotated[Tensor, Index("num_offsets", counts=True)]
    initial_state: Annotated[Tensor | None, Dense("num_offsets - 1", "HV", "V", "K", dtype="work")]
    scale: float = field(kw_only=True)
    qk_l2norm: bool = field(kw_only=True)

    def on_pool(self, pool: Tensor, initial: Tensor, final: Tensor) -> DeltaRule:
        """Give the arguments of the op with a pool."""
        given = (self.q, self.k, self.v, self.g, self.beta, pool, self.cu_seqlens, initial, final)
        impl = f"{CHUNK}_{self.impl}"
        return self.pooled(*given, scale=self.scale, qk_l2norm=self.qk_l2norm, impl=impl)


@dataclass(slots=True, repr=False, eq=False)
class TrainedGatedDeltaRule(TrainedDeltaRule):
    """Gated delta rule by chunks, without pools; ``torch_hybrid.functional`` states it.

    Args:
        q, k: [T, H, K], float dtype. v: [T, HV, V] in that dtype.
        g, beta: [T, HV] float32, or float64 beside float64.
        initial_state: [N, HV, V, K] like g, or None for zeros.
        scale: factor on q.
        qk_l2norm: scale each q and k to unit length first.

    Returns:
        [T, HV, V] outputs in v's dtype, and final states like initial ones, or [0, HV, V, K].
    """

    pooled: ClassVar[type[DeltaRule]] = GatedDeltaRule

    g: Annotated[Tensor, Rows("HV", dtype="work")]

    def check(self) -> None:
        """Raise ValueError unless key heads divide the value heads."""
        check_groups("v must have", self.v.shape[1], self.k.shape[1], "heads of k")


@dataclass(slots=True, repr=False, eq=False)
class TrainedKimiDeltaAttention(TrainedDeltaRule):
    """Kimi delta attention by chunks, without pools; ``torch_hybrid.functional`` states it.

    Arguments and results are those of :func:`gated_delta_rule_forward`, but for g [T, H, K] and
    as many heads of values as of keys.
    """

    pooled: ClassVar[type[DeltaRule]] = KimiDeltaAttention

    g: Annotated[Tensor, Rows("HV", "K", dtype="work")]

    def check(self) -> None:
        """Raise ValueError unless there are as many heads of values as of keys."""
        check_shapes({"v": (self.v, (*self.k.shape[:2], self.v.shape[2]))})


_CPP = Cpp(
    "num_offsets-1=num_seqs H=num_k_heads HV=num_v_heads K=k_dim V=v_dim",
    {
        "g_dim": "x.g.shape[2] if x.g.ndim == 3 else 1",
        "chunk_size": str(DEFAULT_CHUNK_SIZE),
    },
)
_LIMITED = {"head_k_dim": "K", "head_v_dim": "V"}
gated_delta_rule_forward, gated_delta_rule_backward = define_pair(
    TrainedGatedDeltaRule,
    GATED_FORWARD,
    GATED_BACKWARD,
    cpp=_CPP,
    limited=_LIMITED,
    flops=("6 * T * HV * V * K", "16 * T * HV * V * K"),
)
kimi_delta_attention_forward, kimi_delta_attention_backward = define_pair(
    TrainedKimiDeltaAttention,
    KIMI_FORWARD,
    KIMI_BACKWARD,
    cpp=_CPP,
    limited=_LIMITED,
    flops=("6 * T * HV * V * K", "16 * T * HV * V * K"),
)
