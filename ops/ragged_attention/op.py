"""ragged_attention_with_lse: declaration of the op, and the list of implementations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64, Capability, Implementation
from torch_hybrid.ops.core.declare import Cpp, Dense, Index, Op, Rows, define, pair_made
from torch_hybrid.ops.core.registration import check_groups, check_scale
from torch_hybrid.ops.cudnn_attention import cudnn_missing
from torch_hybrid.ops.flashinfer.library import HOPPER, flashinfer_missing
from torch_hybrid.ops.implementations import CUDA, HALVES, in_cpp, in_torch, in_triton

_PACKAGE = "torch_hybrid.ops.ragged_attention"
IMPLEMENTATIONS = {
    "cudnn": Implementation(
        capability=Capability(
            devices=CUDA,
            dtypes=HALVES,
            multiples={"head_dim": 8, "v_head_dim": 8},
            limits={"head_dim": 192, "v_head_dim": 128},
            cuda_graph=True,
            available=cudnn_missing,
        ),
        launcher=f"{_PACKAGE}._cudnn:ragged_attention_with_lse",
        planner="torch_hybrid.ops.cudnn_attention:plan",
    ),
    "cpp": in_cpp(
        f"{_PACKAGE}._cpu.cpp:ragged_attention_with_lse",
        multiples={"head_dim": 16, "v_head_dim": 16},
    ),
    "triton": in_triton(
        f"{_PACKAGE}._triton:ragged_attention_with_lse",
        limits={"head_dim": 256, "v_head_dim": 256},
    ),
    "flashinfer": Implementation(
        capability=Capability(
            devices=CUDA,
            dtypes=HALVES,
            one_of={"head_dim": (192,), "v_head_dim": (128,)},
            cuda_graph=True,
            available=flashinfer_missing(capabilities=HOPPER),
        ),
        launcher=f"{_PACKAGE}._flashinfer:ragged_attention_with_lse",
        planner=f"{_PACKAGE}._flashinfer:plan",
        by_name="a NaN in rows that follow a sequence's keys gets into its results",
    ),
    "torch": in_torch(f"{_PACKAGE}._torch:ragged_attention_with_lse", dtypes=FLOATS_AND_FLOAT64),
}


@dataclass(slots=True, repr=False, eq=False)
class RaggedAttentionWithLse(Op):
    """Attention within each sequence of a packed batch, and the log-sum-exp of the logits.

    N sequences of any number of queries and keys, none included; H query heads, Hk key heads
    (query head i reads key head ``i // (H // Hk)``), values of another size than keys. This is
    the expanded form of multi-head latent attention (DeepSeek-V2): causal over the new tokens,
    and not causal over each chunk of their prefix, the results joined by ``merge_states``.

    Args:
        q: [Tq, H, D], float32, bfloat16 or float16; any strides that keep D contiguous.
        k: [Tk, Hk, D], as q; k and v may be slices of one projection.
        v: [Tk, Hk, Dv], as q.
        cu_seqlens_q: [N + 1] int32, offsets of each sequence's queries, from 0; queries from
            ``cu_seqlens_q[N]`` on are padding.
        cu_seqlens_k: [N + 1] int32, offsets of each sequence's keys, from 0.
        causal: whether query i of a sequence with n queries and m keys sees its first
            ``m - n + i + 1`` keys alone (the last query sees all).
        scale: factor of the logits, usually ``D ** -0.5``.
        planned: for an implementation that plans, what its planner made of the lengths of a causal
            call, whose keys end where the queries do: values as a tensor on the host.

    Returns:
        The output, [Tq, H, Dv] in the dtype of q, and the natural-log LSE, [Tq, H] float32.
        Padding queries, and queries that see no key, hold ``(0, -inf)``, the identity of
        ``merge_states``.
    """

    q: Annotated[Tensor, Rows("H", "D", last_dim=True)]
    k: Annotated[Tensor, Dense("num_keys", "Hk", "D", last_dim=True)]
    v: Annotated[Tensor, Dense("num_keys", "Hk", "Dv", last_dim=True)]
    cu_seqlens_q: Annotated[Tensor, Index("num_offsets", counts=True)]
    cu_seqlens_k: Annotated[Tensor, Index("num_offsets")]
    causal: bool = field(kw_only=True)
    scale: float = field(kw_only=True)
    planned: Sequence[Tensor] | None = field(default=(), kw_only=True)

    def check(self) -> None:
        """Raise ValueError unless the heads fit each other, and the scale is positive."""
        num_heads, num_k_heads = self.q.shape[1], self.k.shape[1]
        check_groups("q heads must be", num_heads, num_k_heads, "key heads")
        check_scale(self.scale)

    @property
    def cu_seqlens(self) -> Tensor:
        """Offsets of the queries."""
        return self.cu_seqlens_q

    def check_indices(self) -> None:
        """Raise ValueError unless the offsets rise from 0 to at most the number of rows."""
        for name, tensor, rows in (
            ("q", self.cu_seqlens_q, self.q.shape[0]),
            ("k", self.cu_seqlens_k, self.k.shape[0]),
        ):
            offsets = tensor.tolist()
            if offsets[0] != 0 or sorted(offsets) != offsets or offsets[-1] > rows:
                raise ValueError(
                    f"cu_seqlens_{name} must rise from 0 to at most {rows}, got {offsets}"
                )


def empty(x: RaggedAttentionWithLse) -> tuple[Tensor, Tensor]:
    """Allocate the output and its LSE."""
    out = x.q.new_empty(*x.q.shape[:2], x.v.shape[2])
    return out, x.q.new_empty(x.q.shape[:2], dtype=torch.float32)


ragged_attention_with_lse = define(
    RaggedAttentionWithLse,
    IMPLEMENTATIONS,
    returns=pair_made(empty),
    limited={"head_dim": "D", "v_head_dim": "Dv"},
    names_ndim=True,
    flops="2 * T * H * (D + Dv) * num_keys // max(num_offsets - 1, 1)",
    cpp=Cpp(
        "T=num_queries num_keys num_offsets-1=num_seqs H=num_heads Hk=num_k_heads D=head_dim "
        "Dv=v_head_dim"
    ),
)
