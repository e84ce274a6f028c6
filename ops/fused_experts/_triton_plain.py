"""Weights of x's dtype in Triton: the loader, whose functions are for few tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.fused_experts._triton_loader import FewTile, Loader, Stored, Tile, unscaled
from torch_hybrid.ops.fused_experts.op import FusedExperts
from torch_hybrid.ops.triton.devices import is_hopper

_FEW_COLUMNS = 256  # that a program reads at once, for few tokens


def _stored(x: FusedExperts) -> tuple[Stored, Stored]:
    """Describe both weights to the kernels."""

    def stored(weight: Tensor) -> Stored:
        block = min(_FEW_COLUMNS, triton.next_power_of_2(weight.shape[-1]))
        few = FewTile(rows=8, columns=block, shape=(block,), num_stages=4)
        return Stored(numbers=weight, scales=None, form=(block,), few=few)

    return stored(x.gate_up), stored(x.down)


def _tile(x: FusedExperts, share: int) -> Tile:
    """Choose a tile for pairs of such tokens."""
    if x.x.dtype == torch.float32:  # outside the tensor cores, on operands in registers
        return Tile(block_m=16, block_n=64, block_k=32, num_warps=4, num_stages=2)
    # Most experts have less than twice their share: then one block holds all their pairs.
    rows = triton.next_power_of_2(2 * share)
    if rows <= 16:
        return Tile(block_m=16, block_n=128, block_k=128, num_warps=4, num_stages=3)
    if rows <= 64:
        return Tile(block_m=rows, block_n=128, block_k=64, num_warps=4, num_stages=4)
    block_n, stages = (256, 4) if is_hopper(x.x.device) else (128, 3)
    return Tile(block_m=128, block_n=block_n, block_k=64, num_warps=8, num_stages=stages)


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
    """Find rows from ``first_n`` of a part of an expert's, and the offset of the part."""
    index_n = first_n + tl.arange(0, BLOCK_N)
    p_w = weight + expert * (PARTS * R * K) + index_n[:, None] * K
    p_w += tl.arange(0, FORM[0])[None, :]
    return p_w, (index_n < R)[:, None], PART * R * K


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
    p_w, mask_n, offset = rows
    index_k = tl.arange(0, BLOCK_K)
    mask_k = first + index_k < K
    x = tl.load(p_x + index_k + first, mask=mask_k, other=0.0).to(tl.float32)[None, :]
    w = tl.load(p_w + offset + first, mask=mask_n & mask_k[None, :], other=0.0)
    return w.to(tl.float32) * x


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
    index_k = tl.arange(0, BLOCK_K)
    mask_n = (index_n < D)[:, None]
    mask_k = (first + index_k < I) & is_there
    p_w = down + index_n[:, None] * I + index_k[None, :]
    x = tl.load(hidden + pair * I + first + index_k, mask=mask_k, other=0.0)
    w = tl.load(p_w + expert * (D * I) + first, mask=mask_n & mask_k[None, :], other=0.0)
    return w.to(tl.float32) * (x.to(tl.float32) * weight)[None, :]


PLAIN = Loader(
    stored=_stored,
    tile=_tile,
    rows=_rows,
    add=None,
    scale=unscaled,
    multiply=_multiply,
    multiply_hidden=_multiply_hidden,
)
