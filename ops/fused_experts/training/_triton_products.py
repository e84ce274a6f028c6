"""Grouped products of what torch multiplies in groups on the host: all dtypes but bfloat16.

Products of float32 run outside the tensor cores, as everywhere here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.fused_experts._triton_group import num_blocks, rows_of_block
from torch_hybrid.ops.triton.products import dot


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tile of ``block_m`` by ``block_n`` results, of ``block_k`` products at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int

    def options(self) -> dict[str, Any]:
        """Return what a launch is given."""
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return {**blocks, "num_warps": self.num_warps, "enable_fp_fusion": True}


_TILE = Tile(block_m=64, block_n=64, block_k=16, num_warps=4)


def grouped_product(
    rows: Tensor, weight: Tensor, starts: Tensor, *, of_output: bool = False
) -> Tensor:
    """Multiply rows [R, K] by each one's expert [N, K]; rows without one are not written.

    Args:
        rows: [R, K] in the order of experts; with ``of_output`` [R, N].
        weight: [E, N, K].
        starts: [E + 1] int32 row where those of each expert begin.
        of_output: whether weights are transposed.
    """
    num_experts, *sizes = weight.shape
    depth, width = sizes if of_output else sizes[::-1]
    out = rows.new_empty(len(rows), width)
    blocks = num_blocks(len(rows), num_experts, _TILE.block_m)
    _product_kernel[(blocks * triton.cdiv(width, _TILE.block_n),)](
        *(rows, weight, out, starts),
        E=num_experts,
        N=width,
        K=depth,
        IS_TRANSPOSED=of_output,
        BLOCK_E=triton.next_power_of_2(num_experts),
        **_TILE.options(),
    )
    return out


def grouped_weight_product(dout: Tensor, rows: Tensor, like: Tensor, starts: Tensor) -> Tensor:
    """Sum ``dout^T rows`` [N, K] over the rows of each expert, 0 where there are none."""
    grad = torch.empty_like(like)
    num_experts, width, depth = like.shape
    tiles = triton.cdiv(width, _TILE.block_m) * triton.cdiv(depth, _TILE.block_n)
    _weight_product_kernel[(num_experts * tiles,)](
        *(dout, rows, grad, starts), N=width, K=depth, **_TILE.options()
    )
    return grad


@triton.jit
def _product_kernel(
    rows: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    starts: tl.tensor,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute BLOCK_N outputs of BLOCK_M rows of one expert: a grouped GEMM.

    Grid: blocks of rows times columns, in one dimension; blocks past the last row are idle. Tile:
    BLOCK_M by BLOCK_N, in steps of BLOCK_K. Registers: one accumulator.
    """
    NUM_COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // NUM_COLUMNS
    expert, begin, end = rows_of_block(starts, block, E, BLOCK_E, BLOCK_M)
    if expert == E:
        return
    row = begin + tl.arange(0, BLOCK_M)
    mask_m = (row < end)[:, None]
    index_n = tl.program_id(0) % NUM_COLUMNS * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask_n = index_n < N
    index_k = tl.arange(0, BLOCK_K)
    p_x = rows + row.to(tl.int64)[:, None] * K
    p_w = weight + expert.to(tl.int64) * (N * K)
    p_w += index_n if IS_TRANSPOSED else index_n * K
    STRIDE_K: tl.constexpr = N if IS_TRANSPOSED else 1
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + index_k
        b_x = tl.load(p_x + k[None, :], mask=mask_m & (k < K)[None, :], other=0.0)
        b_w = tl.load(p_w + k[:, None] * STRIDE_K, mask=mask_n & (k < K)[:, None], other=0.0)
        acc = dot(b_x, b_w, acc)
    p_out = out + row.to(tl.int64)[:, None] * N + index_n
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=mask_m & mask_n)


@triton.jit
def _weight_product_kernel(
    dout: tl.tensor,
    rows: tl.tensor,
    grad: tl.tensor,
    starts: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Sum BLOCK_M by BLOCK_N gradients of one expert over its rows, BLOCK_K at a time.

    Grid: experts times tiles of their weights, in one dimension. Registers: one accumulator.
    """
    ACROSS: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = (N + BLOCK_M - 1) // BLOCK_M * ACROSS
    expert = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    end = tl.load(starts + expert + 1)
    index_n = tile // ACROSS * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    index_k = tile % ACROSS * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(tl.load(starts + expert), end, BLOCK_K):
        row = first + tl.arange(0, BLOCK_K)
        mask = row < end
        at = row.to(tl.int64)
        b_d = tl.load(
            dout + at[None, :] * N + index_n, mask=mask[None, :] & (index_n < N), other=0.0
        )
        b_x = tl.load(
            rows + at[:, None] * K + index_k, mask=mask[:, None] & (index_k < K), other=0.0
        )
        acc = dot(b_d, b_x, acc)
    p_grad = grad + expert.to(tl.int64) * (N * K) + index_n * K + index_k
    tl.store(p_grad, acc.to(grad.dtype.element_ty), mask=(index_n < N) & (index_k < K))
