# mypy: disable-error-code="untyped-decorator"
"""Implementation "cudnn": sequences that attend to themselves alone do so by cuDNN.

Those are new tokens without a prefix. A call for other keys is one for implementation "triton":
chunks of a prefix, and new tokens together with a prefix. Which of the two a causal call is was
planned, and each has a captured graph of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops import cudnn_attention
from torch_hybrid.ops.ragged_attention import _triton


def ragged_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool,
    scale: float,
    planned: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Launcher of ``torch_hybrid::ragged_attention_with_lse``."""
    if not causal or not cudnn_attention.attends(q, k, v, planned):
        return _triton.ragged_attention_with_lse(
            q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, scale=scale
        )
    num_tokens, num_heads, _ = q.shape
    out, lse = cudnn_attention.attend(q, k, v, cu_seqlens_q, scale=scale, with_lse=True)
    lse = lse.view(num_tokens, num_heads)
    _padding_kernel[(num_tokens,)](
        cu_seqlens_q,
        out,
        lse,
        cu_seqlens_q.shape[0] - 1,
        H=num_heads,
        SIZE=num_heads * v.shape[2],
        BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK=1024,
        num_warps=1,
    )
    return out, lse


@triton.jit(do_not_specialize=["num_seqs"])
def _padding_kernel(
    cu_seqlens: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    num_seqs: tl.tensor,
    H: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one row, which is set to what rows of padding hold if it is one."""
    token = tl.program_id(0).to(tl.int64)
    if token < tl.load(cu_seqlens + num_seqs):
        return
    for base in range(0, SIZE, BLOCK):
        index = base + tl.arange(0, BLOCK)
        zeros = tl.zeros_like(index).to(out.dtype.element_ty)
        tl.store(out + token * SIZE + index, zeros, mask=index < SIZE)
    head = tl.arange(0, BLOCK_H)
    nothing = tl.full([BLOCK_H], -float("inf"), dtype=tl.float32)
    tl.store(lse + token * H + head, nothing, mask=head < H)
