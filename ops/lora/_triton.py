"""Implementation "triton": a program takes a row, which so has the bits that it has alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.lora.op import Lora
from torch_hybrid.ops.triton.early import follow
from torch_hybrid.ops.triton.launch import bind

# Rows of a tile, its columns at most, warps. With more than _FEW_TOKENS there are programs enough:
# loads ahead then cost more than they save. A column is summed in the order of ranks either way.
_INNER = 4, 2048, 4
_OUTER, _OUTER_OF_MANY = (16, 256, 4), (1, 256, 1)
_FEW_TOKENS = 128


def lora(x: Lora) -> Tensor:
    """Launch ``torch_hybrid::lora``."""
    out = x.empty()
    if not out.numel():
        return out
    _, num_parts, most, depth = x.a.shape
    num_tokens, width = x.base.shape
    inner = x.base.new_empty(num_tokens, num_parts, most, dtype=torch.float32)
    block_r, block_i, num_warps = _INNER
    bind(_lora_inner_kernel, x)[num_tokens, num_parts, triton.cdiv(most, block_r)](
        inner=inner,
        BLOCK_R=block_r,
        BLOCK_I=min(triton.next_power_of_2(depth), block_i),
        num_warps=num_warps,
    )
    block_r, block_o, num_warps = _OUTER if num_tokens <= _FEW_TOKENS else _OUTER_OF_MANY
    bind(_lora_outer_kernel, x)[num_tokens, triton.cdiv(width, block_o)](
        inner=inner,
        out=out,
        BLOCK_R=min(most, block_r),
        BLOCK_O=block_o,
        num_warps=num_warps,
    )
    return out


@triton.jit
def _lora_inner_kernel(
    x: tl.tensor,
    a: tl.tensor,
    ranks: tl.tensor,
    slots: tl.tensor,
    inner: tl.tensor,
    stride_x: tl.tensor,
    K: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Multiply a row by BLOCK_R rows of its adapter's first factor in a program."""
    follow(EARLY)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot > 0:
        place = (slot.to(tl.int64) - 1) * P + part
        rank = tl.load(ranks + place)
        first = tl.program_id(2) * BLOCK_R
        if first < rank:
            row = first + tl.arange(0, BLOCK_R)
            index = tl.arange(0, BLOCK_I)
            p_a = a + (place * R + row)[:, None] * K
            acc = tl.zeros([BLOCK_R, BLOCK_I], dtype=tl.float32)
            for begin in range(0, K, BLOCK_I):
                mask = begin + index < K
                b_x = tl.load(x + token * stride_x + begin + index, mask=mask, other=0.0)
                mask_a = (row < rank)[:, None] & mask[None, :]
                b_a = tl.load(p_a + begin + index[None, :], mask=mask_a, other=0.0)
                acc += b_a.to(tl.float32) * b_x.to(tl.float32)[None, :]
            tl.store(inner + (token * P + part) * R + row, tl.sum(acc, 1), mask=row < rank)


@triton.jit
def _lora_outer_kernel(
    base: tl.tensor,
    inner: tl.tensor,
    b: tl.tensor,
    ranks: tl.tensor,
    starts: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    stride_base: tl.tensor,
    N: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Add multiples of the rows of a second factor to BLOCK_O columns of a row in a program, one
    after the other; BLOCK_R of them are loaded at once, columns of other parts too, so that a
    thread loads several together."""
    follow(EARLY)
    token = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK_O
    column = begin + tl.arange(0, BLOCK_O)
    mask = column < N
    b_base = tl.load(base + token * stride_base + column, mask=mask)
    acc = b_base.to(tl.float32)
    slot = tl.load(slots + token)
    if slot > 0:
        adapter = slot.to(tl.int64) - 1
        for part in range(P):
            first, last = tl.load(starts + part), tl.load(starts + part + 1)
            if (first < begin + BLOCK_O) & (begin < last):
                own = (column >= first) & (column < last)
                p_inner = inner + (token * P + part) * R
                rank = tl.load(ranks + adapter * P + part)
                for lowest in range(0, rank, BLOCK_R):
                    for offset in tl.static_range(BLOCK_R):
                        r = lowest + offset
                        mask_b = mask & (r < rank)
                        row = tl.load(b + (adapter * R + r) * N + column, mask=mask_b, other=0.0)
                        added = tl.load(p_inner + r, mask=r < rank, other=0.0) * row.to(tl.float32)
                        acc = tl.where(own & (r < rank), acc + added, acc)
    tl.store(out + token * N + column, acc.to(out.dtype.element_ty), mask=mask)
