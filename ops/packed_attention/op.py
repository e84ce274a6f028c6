"""Attention within packed sequences on a CPU, which differentiates, without a T x T mask.

Lengths are read, so it is an op: a graph has it as one node. On a GPU torch's own kernels take
lengths from the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64, Capability, Implementation
from torch_hybrid.ops.core.declare import Cpp, Index, Op, Rows, define, pair_made, several_made
from torch_hybrid.ops.core.registration import check_groups
from torch_hybrid.ops.core.state_bounds import check_offsets
from torch_hybrid.ops.implementations import CPU, in_cpp

_BY_TORCH = Capability(devices=CPU, dtypes=FLOATS_AND_FLOAT64)
_CPP = Cpp(
    "num_offsets-1=num_seqs H=num_heads HKV=num_k_heads K=head_dim V=v_head_dim",
    values={
        "span": "x.window or 2**31",
        "reach": "0 if x.bias is None else x.bias.shape[2]",
        "num_picked": "0 if x.blocks is None else x.blocks.shape[1]",
    },
)


def _implementations(launcher: str) -> dict[str, Implementation]:
    folder = "torch_hybrid.ops.packed_attention"
    return {
        "cpp": in_cpp(f"{folder}._cpu.cpp:{launcher}", checks_indices=False),
        "torch": Implementation(capability=_BY_TORCH, launcher=f"{folder}._torch:{launcher}"),
    }


@dataclass(slots=True, repr=False, eq=False)
class PackedAttentionForward(Op):
    """Attention from each token to those before it in its sequence, and to itself.

    Args:
        q: [T, H, K], float dtype; rows and heads any distance apart. k [T, HKV, K] and
            v [T, HKV, V] likewise, in that dtype.
        cu_seqlens: [N + 1] int32, from 0 to at most T; equal ones are empty sequences.
        blocks: [T, B] int32, or None. A sequence is cut into blocks of ``block_size``. A query
            attends to these complete ones, by number, -1 for none; and to tokens after all complete
            ones. It names all where they are at most B. As ``select_blocks`` returns them.
        bias: [T, H, R] in that dtype, or None: what a query adds to the logit of the key at each
            distance. Those at R or more have 0.
        scale: factor on products.
        window: tokens that one attends to, itself among them; None for all.
        block_size: tokens in a block.

    Returns:
        [T, H, V] outputs in q's dtype, and log-sum-exps [T, H] in float32, or float64 beside it.
        Rows behind the last sequence are zeros.
    """

    q: Annotated[Tensor, Rows("H", "K", last_dim=True)]
    k: Annotated[Tensor, Rows("HKV", "K", last_dim=True)]
    v: Annotated[Tensor, Rows("HKV", "V", last_dim=True)]
    cu_seqlens: Annotated[Tensor, Index("num_offsets", counts=True)]
    blocks: Annotated[Tensor | None, Index("T", "B", counts=True)]
    bias: Annotated[Tensor | None, Rows("H", "R", last_dim=True)]
    scale: float = field(kw_only=True)
    window: int | None = field(default=None, kw_only=True)
    block_size: int = field(default=1, kw_only=True)

    def check(self) -> None:
        """Raise ValueError unless heads go in groups, and windows and blocks have tokens."""
        check_groups("q must have", self.q.shape[1], self.k.shape[1], "heads of k")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        if self.blocks is not None and (self.window is not None or self.block_size < 1):
            raise ValueError(
                f"beside blocks, window must be None and block_size at least 1, "
                f"got {self.window} and {self.block_size}"
            )

    def check_indices(self) -> None:
        """Raise ValueError unless sequences are among the tokens, and blocks complete."""
        check_offsets(self.cu_seqlens, num_tokens=self.q.shape[0])
        if self.blocks is not None:
            token = torch.arange(int(self.cu_seqlens[-1]), dtype=torch.int64, device="cpu")
            seq = torch.searchsorted(self.cu_seqlens, token, right=True) - 1
            complete = (token - self.cu_seqlens[seq] + 1) // self.block_size
            rows = self.blocks[: len(token)]
            if bool(((rows < -1) | (rows >= complete[:, None])).any()):
                raise ValueError("blocks must be complete before their queries, or -1")


@dataclass(slots=True, repr=False, eq=False)
class PackedAttentionBackward(PackedAttentionForward):
    """Gradients of :func:`packed_attention_forward`.

    Args:
        q, k, v, cu_seqlens, blocks, bias, scale, window, block_size: those of the forward.
        out, lse: what it returned.
        dout: [T, H, V] gradient of the outputs.
        dlse: [T, H] gradient of the log-sum-exps, or None for zeros.

    Returns:
        Gradients of q, k, v and bias; empty where that is None.
    """

    out: Annotated[Tensor, Rows("H", "V")]
    lse: Annotated[Tensor, Rows("H", dtype="work")]
    dout: Annotated[Tensor, Rows("H", "V")]
    dlse: Annotated[Tensor | None, Rows("H", dtype="work")]


def empty_results(x: PackedAttentionForward) -> tuple[Tensor, Tensor]:
    """Make the tensors that a forward returns."""
    lse = x.q.new_empty(x.q.shape[:2], dtype=torch.promote_types(x.q.dtype, torch.float32))
    return x.q.new_empty(*x.q.shape[:2], x.v.shape[2]), lse


def empty_gradients(x: PackedAttentionForward) -> tuple[Tensor, ...]:
    """Make the tensors that a backward returns."""
    bias = x.q.new_empty(0) if x.bias is None else x.bias
    return tuple(each.new_empty(each.shape) for each in (x.q, x.k, x.v, bias))


packed_attention_backward = define(
    PackedAttentionBackward,
    _implementations("packed_attention_backward"),
    returns=several_made(4, empty_gradients),
    flops="T * T * H * (6 * K + 4 * V) // max(num_offsets - 1, 1)",
    cpp=_CPP,
)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, cu_seqlens, blocks, bias, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    given = (q, k, v, cu_seqlens, blocks, bias, out, lse, dout, dlse)
    *grads, dbias = packed_attention_backward(*given, **ctx.options)
    return *grads, None, None, None if bias is None else dbias


packed_attention_forward = define(
    PackedAttentionForward,
    _implementations("packed_attention_forward"),
    returns=pair_made(empty_results),
    backward=_gradients,
    saves_results=2,
    flops="2 * T * T * H * (K + V) // max(num_offsets - 1, 1)",
    cpp=_CPP,
)
