# mypy: disable-error-code="untyped-decorator"
"""What rows of padding hold, where the kernel that attends leaves them alone."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def set_padding(out: Tensor, lse: Tensor, cu_seqlens: Tensor) -> None:
    """Put the identity of a merge, ``(0, -inf)``, into the rows from ``cu_seqlens[N]`` on.

    ``out`` [T, H, D] and ``lse`` [T, H] are contiguous.
    """
    num_tokens, num_heads, _ = out.shape
    _padding_kernel[(num_tokens,)](
        out,
        lse,
        cu_seqlens,
        cu_seqlens.shape[0] - 1,
        SIZE=out[0].numel(),
        H=num_heads,
        BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK=2048,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_seqs"])
def _padding_kernel(
    out: tl.tensor,
    lse: tl.tensor,
    cu_seqlens: tl.tensor,
    num_seqs: tl.tensor,
    SIZE: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one token."""
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
