"""Implementation "triton": a warp takes a row and finds its largest, k times."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.top_k.op import TopK

_TILE = 256  # elements that a warp takes at least: several rows if they are short


def top_k(x: TopK) -> tuple[Tensor, Tensor]:
    """Launch ``torch_hybrid::top_k``."""
    num_columns = x.x.shape[-1]
    rows = x.x.reshape(-1, num_columns)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    values, places = x.empty()
    if not rows.shape[0]:
        return values, places
    block = triton.next_power_of_2(num_columns)
    num_rows = max(1, _TILE // block)
    _top_k_kernel[(triton.cdiv(rows.shape[0], num_rows),)](
        rows,
        values,
        places,
        rows.shape[0],
        rows.stride(0),
        E=num_columns,
        K=x.k,
        ROWS=num_rows,
        BLOCK_E=block,
        num_warps=1,
    )
    return values, places


@triton.jit(do_not_specialize=["num_rows"])
def _top_k_kernel(
    x: tl.tensor,
    values: tl.tensor,
    places: tl.tensor,
    num_rows: tl.tensor,
    stride_x: tl.tensor,
    E: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Find the largest of ROWS rows in a program.

    An element and its place are one integer of 64 bits, whose order is that of the elements, and
    of places the other way round: its maximum is both, and unlike any other.
    """
    LOWEST: tl.constexpr = -(2**63)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    index = tl.arange(0, BLOCK_E)[None, :]
    mask_row = row < num_rows
    mask = mask_row[:, None] & (index < E)
    b_x = tl.load(x + row[:, None] * stride_x + index, mask=mask, other=0.0).to(tl.float32)
    b_x += 0.0  # -0 is 0
    bits = b_x.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(b_x != b_x, 0x7FFFFFFF, order)
    b_left = (order.to(tl.int64) << 32) | (BLOCK_E - 1 - index).to(tl.int64)
    b_left = tl.where(mask, b_left, LOWEST)
    for i in tl.static_range(K):
        best = tl.max(b_left, 1)
        b_left = tl.where(b_left == best[:, None], LOWEST, b_left)
        place = BLOCK_E - 1 - (best & 0xFFFFFFFF)
        # Read again: the integer has lost the sign of 0 and the bits of NaN.
        value = tl.load(x + row * stride_x + place, mask=mask_row)
        tl.store(values + row * K + i, value, mask=mask_row)
        tl.store(places + row * K + i, place, mask=mask_row)
