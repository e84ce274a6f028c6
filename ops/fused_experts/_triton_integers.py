"""Experts of integers in Triton: the loader, which widens weights, so that nothing is rounded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.formats.integers import INT8, depth_of
from torch_hybrid.ops.fused_experts._triton_loader import FewTile, Loader, Stored, Tile
from torch_hybrid.ops.fused_experts.op import FusedExperts
from torch_hybrid.ops.triton.devices import is_hopper
from torch_hybrid.ops.triton.integers import (
    as_bytes,
    chunk_bytes,
    few_products,
    form_of,
    row_scale,
    rows_at,
    wide_tile,
)
from torch_hybrid.ops.triton.products import dot

_FEW_BYTES = 512  # of a row of weights that a program reads at once, for few tokens


def _stored(x: FusedExperts) -> tuple[Stored, Stored]:
    """Describe both weights to the kernels."""

    def stored(weight: Tensor, scales: Tensor | None) -> Stored:
        assert scales is not None
        numbers = as_bytes(weight)
        num_bytes = min(_FEW_BYTES, max(16, triton.next_power_of_2(numbers.shape[-1])))
        group, zeros = form_of(weight, scales)
        side_by_side = chunk_bytes(group)  # that ``few_products`` takes of a row
        return Stored(
            numbers=numbers,
            scales=scales,
            form=(group, zeros, depth_of(weight)),
            few=FewTile(
                rows=4,
                columns=num_bytes * (1 if weight.dtype == INT8 else 2),
                shape=(num_bytes // side_by_side, side_by_side),
            ),
        )

    return stored(x.gate_up, x.gate_up_scales), stored(x.down, x.down_scales)


def _tile(x: FusedExperts, share: int) -> Tile:
    """Choose a tile for pairs of such tokens, and groups of as many numbers as weights have."""
    # Outside the tensor cores, on operands in registers; a tile's products are one chain.
    if x.x.dtype == torch.float32:
        return Tile(block_m=16, block_n=16, block_k=32, num_warps=4, num_stages=2)
    # Where tensor cores read memory, sums of 128 pairs fit registers: weights are widened once.
    if share > 64 and is_hopper(x.x.device):
        assert x.down_scales is not None
        group, _ = form_of(x.down, x.down_scales)
        block_n, num_warps = (64, 4) if group == 128 else (128, 8)
        return Tile(block_m=128, block_n=block_n, block_k=128, num_warps=num_warps, num_stages=3)
    # Most experts have less than twice their share: then one block holds all their pairs.
    block_m = min(max(triton.next_power_of_2(2 * share), 16), 64)
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
    """Find rows from ``first_n`` of a part of an expert's, each with its scales."""
    index_n = first_n + tl.arange(0, BLOCK_N)
    row = expert.to(tl.int64) * (PARTS * R) + index_n + PART * R
    p_w, p_scale = rows_at(weight, scales, row, 0, K, FORM[0], FORM[1])
    return p_w, p_scale, index_n < R


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
    """Add the products of a tile, and keep what float32 sums lose to rounding for the next one."""
    p_w, p_scale, mask_n = rows
    w = wide_tile(p_w, p_scale, first, mask_n, K, FORM[0], FORM[1], x.shape[1], x.dtype)
    if x.dtype == tl.float32:
        part = dot(w, tl.trans(x), tl.zeros_like(acc)) - lost
        total = acc + part
        lost = (total - acc) - part
        acc = total
    else:
        acc = dot(w, tl.trans(x), acc)
    return acc, lost


@triton.jit
def _scale(acc: tl.tensor, rows: tl.tuple, FORM: tl.constexpr) -> tl.tensor:
    """Scale sums of rows by what is not of groups: these were scaled before."""
    scale = row_scale(rows[1], rows[2], FORM[2], FORM[0], FORM[1])
    return acc * (scale[:, None] if len(acc.shape) == 2 else scale)


@triton.jit
def _multiply(
    rows: tl.tuple,
    p_x: tl.tensor,
    first: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORM: tl.constexpr,
) -> tl.tensor:
    """Multiply rows by BLOCK_K columns of one token: [N, chunks, 16]."""
    return few_products(rows[0], rows[1], p_x, first, rows[2], K, FORM[0], FORM[1], BLOCK_K)


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
    pair, expert, is_there, weight = choice
    index_n = first_n + tl.arange(0, BLOCK_N)
    mask_n = (index_n < D) & is_there
    p_w, p_scale = rows_at(down, scales, expert * D + index_n, 0, I, FORM[0], FORM[1])
    scale = row_scale(p_scale, mask_n, FORM[2], FORM[0], FORM[1]) * weight
    p_x = hidden + pair.to(tl.int64) * I
    products = few_products(p_w, p_scale, p_x, first, mask_n, I, FORM[0], FORM[1], BLOCK_K)
    # Hidden activations of an expert that is none were not written.
    return tl.where(is_there, products * scale[:, None, None], 0.0)


INTEGERS = Loader(
    stored=_stored,
    tile=_tile,
    rows=_rows,
    add=_add,
    scale=_scale,
    multiply=_multiply,
    multiply_hidden=_multiply_hidden,
)
