"""Experts in FP8 in Triton: the loader, which scales each sum of 128 products in float32.

Weights are widened in registers; or multiplied as they are, and tokens and hidden activations
rounded as they are loaded.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.formats.block_scales import BLOCK
from torch_hybrid.ops.fused_experts._triton_loader import FewTile, Loader, Stored, Tile, unscaled
from torch_hybrid.ops.fused_experts.op import FusedExperts
from torch_hybrid.ops.triton.fp8 import fp8_product, readable, widen

_FEW_COLUMNS = 2048  # that a program reads at once, for few tokens
_MOST_AT_ONCE = 10  # experts whose rows of ``down`` are on their way
_FEW_PAIRS = 128  # up to so many, programs have half of the rows of weights, and are twice as many
_BLOCK: tl.constexpr = tl.constexpr(BLOCK)


def _stored(x: FusedExperts, *, rounds: bool) -> tuple[Stored, Stored]:
    """Describe both weights to the kernels."""

    def stored(weight: Tensor, scales: Tensor | None, **tile: int) -> Stored:
        assert scales is not None
        block = min(_FEW_COLUMNS, triton.next_power_of_2(weight.shape[-1]))
        few = FewTile(columns=block, shape=(block,), num_stages=1, **tile)
        return Stored(numbers=readable(weight), scales=scales, form=(rounds,), few=few)

    gate_up = stored(x.gate_up, x.gate_up_scales, rows=4)
    unroll = min(x.expert_ids.shape[1], _MOST_AT_ONCE)
    return gate_up, stored(x.down, x.down_scales, rows=16, unroll=unroll, num_warps=16)


def _tile(x: FusedExperts, share: int, *, rounds: bool) -> Tile:
    """Choose a tile whose rows and columns divide 128: gate and up have one scale each."""
    # Outside the tensor cores, on operands in registers.
    if x.x.dtype == torch.float32 and not rounds:
        return Tile(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2)
    # Most experts have less than twice their share: then one block holds all their pairs.
    rows = triton.next_power_of_2(2 * share)
    block_m = min(max(rows, 16), 64)
    if rounds and (rows > 32 or x.num_pairs > _FEW_PAIRS):
        num_warps = 4 if rows <= 16 else 8
        return Tile(block_m=block_m, block_n=128, block_k=128, num_warps=num_warps, num_stages=3)
    return Tile(block_m=block_m, block_n=64, block_k=128, num_warps=4, num_stages=3)


@triton.jit
def _rows(
    weight: tl.tensor,
    scales: tl.tensor,
    expert: tl.tensor,
    first_n: tl.tensor,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FORM: tl.constexpr,
) -> tl.tuple:
    """Find rows from ``first_n`` of a part of an expert's, in one block of scales."""
    HIGH: tl.constexpr = (R + _BLOCK - 1) // _BLOCK
    WIDE: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    index_n = first_n + tl.arange(0, BLOCK_N)
    p_w = weight + expert.to(tl.int64) * (PARTS * R * K) + index_n[:, None] * K
    p_scale = scales + (expert * (PARTS * HIGH) + first_n // _BLOCK) * WIDE
    # Offsets of the part, added where columns are: so gate and up share registers.
    return p_w, p_scale, index_n < R, PART * R * K, PART * HIGH * WIDE


@triton.jit
def _add(
    acc: tl.tensor,
    lost: tl.tensor,
    rows: tl.tuple,
    x: tl.tensor,
    first: tl.tensor,
    K: tl.constexpr,
    FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Add the products of a tile, each sum of 128 of them scaled."""
    p_w, p_scale, mask_n, offset, scale_offset = rows
    k = first + tl.arange(0, x.shape[1])[None, :]
    w = tl.load(p_w + offset + k, mask=mask_n[:, None] & (k < K), other=0.0)
    scale = tl.load(p_scale + scale_offset + first // _BLOCK)
    acc += fp8_product(w, x, tl.zeros_like(acc), FORM[0]) * scale
    return acc, lost


@triton.jit
def _multiply(
    rows: tl.tuple,
    p_x: tl.tensor,
    first: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Multiply rows by BLOCK_K columns of one token: [N, BLOCK_K]."""
    p_w, p_scale, mask_n, offset, scale_offset = rows
    k = first + tl.arange(0, BLOCK_K)
    x = tl.load(p_x + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.load(p_scale + scale_offset + k // _BLOCK, mask=k < K, other=0.0)
    w = tl.load(p_w + offset + k[None, :], mask=mask_n[:, None] & (k < K)[None, :], other=0.0)
    return widen(w, tl.float32) * (x * scale)[None, :]


@triton.jit
def _multiply_hidden(
    down: tl.tensor,
    scales: tl.tensor,
    hidden: tl.tensor,
    choice: tl.tuple,
    first_n: tl.tensor,
    first: tl.tensor,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 (the letter of the formulas)
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Multiply rows of a pair's expert by its hidden activations and its weight."""
    HIGH: tl.constexpr = (D + _BLOCK - 1) // _BLOCK
    WIDE: tl.constexpr = (I + _BLOCK - 1) // _BLOCK
    pair, expert, is_there, weight = choice
    index_n = first_n + tl.arange(0, BLOCK_N)
    k = first + tl.arange(0, BLOCK_K)
    mask_k = (k < I) & is_there
    p_scale = scales + first_n // _BLOCK * WIDE + expert * (HIGH * WIDE)
    scale = tl.load(p_scale + k // _BLOCK, mask=mask_k, other=0.0)
    x = tl.load(hidden + pair * I + k, mask=mask_k, other=0.0)
    p_w = down + index_n[:, None] * I + expert * (D * I) + k[None, :]
    w = tl.load(p_w, mask=(index_n < D)[:, None] & mask_k[None, :], other=0.0)
    return widen(w, tl.float32) * (x.to(tl.float32) * (weight * scale))[None, :]


FP8 = Loader(
    stored=partial(_stored, rounds=False),
    tile=partial(_tile, rounds=False),
    rows=_rows,
    add=_add,
    scale=unscaled,
    multiply=_multiply,
    multiply_hidden=_multiply_hidden,
)
# Tokens and hidden activations are rounded to FP8.
ROUNDED_FP8 = replace(FP8, stored=partial(_stored, rounds=True), tile=partial(_tile, rounds=True))
