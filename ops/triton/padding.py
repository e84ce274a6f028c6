"""Padding rows of attention's outputs, where the attending kernel leaves them unwritten."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.triton.devices import PROCESSORS


def set_padding(out: Tensor, lse: Tensor, cu_seqlens: Tensor, *, lse_unit: float = 1.0) -> None:
    """Put the identity of a merge, ``(0, -inf)``, into the rows from ``cu_seqlens[N]`` on.

    ``out`` [T, H, D] and ``lse`` [T, H] are contiguous. ``lse_unit`` is what 1 of an LSE is before:
    ``log(2)`` for one of base 2; afterwards all are natural logarithms.
    """
    num_tokens, num_heads, _ = out.shape
    # Rows of padding are few, as a rule; those that change their unit are all the others.
    num_programs = num_tokens if lse_unit != 1.0 else min(num_tokens, PROCESSORS)
    _padding_kernel[(num_programs,)](
        out,
        lse,
        cu_seqlens,
        cu_seqlens.shape[0] - 1,
        num_tokens,
        SIZE=out[0].numel(),
        H=num_heads,
        BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK=2048,
        LSE_UNIT=lse_unit,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _padding_kernel(
    out: tl.tensor,
    lse: tl.tensor,
    cu_seqlens: tl.tensor,
    num_seqs: tl.tensor,
    num_tokens: tl.tensor,
    SIZE: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    LSE_UNIT: tl.constexpr,
) -> None:
    """Write (0, -inf) to padding rows, and convert the LSEs of the others to natural logarithms.

    Grid: up to a program for each token, which strides over tokens. Tile: BLOCK elements of one
    row.
    """
    end = tl.load(cu_seqlens + num_seqs)
    head = tl.arange(0, BLOCK_H)
    if LSE_UNIT != 1.0:
        for token in range(tl.program_id(0), end, tl.num_programs(0)):
            p_lse = lse + tl.cast(token, tl.int64) * H + head
            tl.store(p_lse, tl.load(p_lse, mask=head < H) * LSE_UNIT, mask=head < H)
    nothing = tl.full([BLOCK_H], -float("inf"), dtype=tl.float32)
    for token in range(end + tl.program_id(0), num_tokens, tl.num_programs(0)):
        row = tl.cast(token, tl.int64)
        for base in range(0, SIZE, BLOCK):
            index = base + tl.arange(0, BLOCK)
            zeros = tl.zeros_like(index).to(out.dtype.element_ty)
            tl.store(out + row * SIZE + index, zeros, mask=index < SIZE)
        tl.store(lse + row * H + head, nothing, mask=head < H)
