"""Implementation "triton": one kernel for each length of a row and dtype.

Rows that are added up first have another one, which sums in the same order.

A compiler lays a row out over threads by what it knows of addresses, and adds it up as it lies. So
the kernel is told nothing of strides, alignments or numbers of rows: there is one order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.power_sum.op import PowerSum

_WIDEST = 4096  # elements of a row that a program adds up at once
_TILE = 1024  # elements that a program takes at least, of several rows if they are short
_MOST_ROWS = 8
_OF_A_WARP = 512  # elements, of long rows


def power_sum(x: PowerSum) -> Tensor:
    """Launch ``torch_hybrid::power_sum``."""
    num_columns, out = x.x.shape[-1], x.empty()
    if not out.numel():
        return out
    rows = _in_groups(x.x)
    others = rows if x.addend is None else _in_groups(x.addend)
    block = min(triton.next_power_of_2(max(num_columns, 1)), _WIDEST)
    num_rows = min(max(1, _TILE // block), _MOST_ROWS)
    _power_sum_kernel[(triton.cdiv(out.numel(), num_rows),)](
        rows,
        None if x.addend is None else others,
        out,
        out.numel(),
        rows.shape[1],
        rows.stride(0),
        rows.stride(1),
        others.stride(0),
        others.stride(1),
        D=num_columns,
        SQUARED=x.power == 2,
        ROWS=num_rows,
        BLOCK=block,
        num_warps=max(1, block // _OF_A_WARP),
        enable_fp_fusion=False,  # of two squares, either could be the one that is not rounded
    )
    return out


def _in_groups(x: Tensor) -> Tensor:
    """View rows as [outer, inner, D], the elements of each beside one another."""
    rows = x.unsqueeze(0) if x.dim() == 1 else x
    rows = rows if x.shape[-1] < 2 or x.stride(-1) == 1 else rows.contiguous()
    return rows.flatten(0, -3) if x.dim() > 2 else rows.unsqueeze(0)


_UNKNOWN = [
    *("num_rows", "num_inner", "stride_outer", "stride_inner"),
    *("stride_addend_outer", "stride_addend_inner"),
]


@triton.jit(do_not_specialize=_UNKNOWN, do_not_specialize_on_alignment=["x", "addend", "out"])
def _power_sum_kernel(
    x: tl.tensor,
    addend: tl.tensor | None,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_inner: tl.tensor,
    stride_outer: tl.tensor,
    stride_inner: tl.tensor,
    stride_addend_outer: tl.tensor,
    stride_addend_inner: tl.tensor,
    D: tl.constexpr,
    SQUARED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add up ROWS rows, which lie in groups of ``num_inner``, in a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask_row = row < num_rows
    outer, inner = row // num_inner, row % num_inner
    p_row = x + outer * stride_outer + inner * stride_inner
    if addend is not None:
        p_addend = addend + outer * stride_addend_outer + inner * stride_addend_inner
    b_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = mask_row[:, None] & (column < D)[None, :]
        b_x = tl.load(p_row[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if addend is not None:
            p_added = p_addend[:, None] + column[None, :]
            b_x += tl.load(p_added, mask=mask, other=0.0).to(tl.float32)
            b_x = b_x.to(x.dtype.element_ty).to(tl.float32)
        b_sum += b_x * b_x if SQUARED else b_x
    tl.store(out + row, tl.sum(b_sum, 1), mask=mask_row)
