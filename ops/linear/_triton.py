"""Implementation "triton": all weights of one input in one launch, for few rows.

Memory bounds the product of few rows. One launch has all weights on their way at once, where one
after the other each waits for memory anew.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.formats import block_scales
from torch_hybrid.ops.linear._triton_columns import store_columns
from torch_hybrid.ops.linear._triton_fp8 import fp8_linear
from torch_hybrid.ops.linear._triton_integers import integer_linear
from torch_hybrid.ops.linear._triton_tile import BUSY, Tile, is_empty, readable_biases
from torch_hybrid.ops.linear.by_torch import empty_columns, product_by_torch
from torch_hybrid.ops.linear.op import Linear
from torch_hybrid.ops.triton.devices import is_hopper
from torch_hybrid.ops.triton.launch import bind

# Measured, see README.md: past these, torch's product of one weight after the other is faster.
MAX_ROWS = 64
_MAX_DEPTH = 4096  # of more than few rows: a program walks it alone
# Few rows and columns are multiplied outside the tensor cores, which leaves more programs.
_FEW_ROWS = 4
_FEW_COLUMNS = 4096
# With more rows, programs have few columns, and their warps share the depth.
_PART_ROWS = 32
_PART_DEPTH = 1024
_PART_COLUMNS = 1024  # of one weight: fewer are faster by torch
# Of batch-invariant products: columns that are too few programs of 64.
_NARROW = 2048


def linear(x: Linear, *, is_invariant: bool = False) -> Tensor:
    """Multiply by all weights in one launch, or by torch where that is faster.

    With ``is_invariant``, any number of rows is multiplied in one launch and one order of sums.
    """
    if x.scales is not None:
        is_fp8 = x.weights[0].dtype == block_scales.DTYPE
        multiply = fp8_linear if is_fp8 else integer_linear
        return multiply(x, is_invariant=is_invariant)
    if is_invariant:
        y = x.x.new_empty(x.x.shape[0], sum(x.sizes))
        if y.numel():
            _multiply(x, y, _tile_of_any_rows(x), any_rows=True)
        return y
    y = empty_columns(x.x, x.sizes)
    if not _is_ours(x):
        return product_by_torch(x.x, x.weights, x.biases, y)
    _multiply(x, y, _tile(x))
    return y


def _multiply(x: Linear, y: Tensor, tile: Tile, *, any_rows: bool = False) -> None:
    """Fill ``y``, which has elements; ``any_rows``: programs take rows in blocks."""
    bind(_linear_kernel, x)[tile.grid(x)](
        weights=tuple(x.weights),
        biases=readable_biases(x),
        y=y,
        M=x.x.shape[0],
        ROWS_IN_BLOCKS=any_rows,
        **tile.options(x),
    )


def _tile(x: Linear) -> Tile:
    """Choose the tile of few rows."""
    (num_rows, depth), num_columns = x.x.shape, sum(x.sizes)
    if num_rows <= _FEW_ROWS and num_columns <= _FEW_COLUMNS:
        block_m = triton.next_power_of_2(num_rows)
        return Tile(block_m=block_m, block_n=4, block_k=512, num_stages=4)
    if num_rows <= _PART_ROWS and num_columns <= _FEW_COLUMNS and depth >= _PART_DEPTH:
        block_m = 16 if num_rows <= 16 else 32
        return Tile(block_m=block_m, block_n=16, block_k=128, num_stages=4, num_parts=4)
    block_m, stages = (16, 5) if num_rows <= 16 else (32, 4) if num_rows <= 32 else (64, 3)
    return Tile(block_m=block_m, block_n=64, block_k=128, num_stages=stages)


def _tile_of_any_rows(x: Linear) -> Tile:
    """Choose the tile of rows in blocks, among tiles that all sum a row in one order.

    A sum goes along the depth, 16 products after 16 on tensor cores, whatever else a tile has.
    That was tried on Hopper; elsewhere there is one tile.
    """
    num_rows, num_columns = x.x.shape[0], sum(x.sizes)
    one = partial(Tile, block_m=64, block_n=64, block_k=128, num_stages=3)
    if x.x.dtype == torch.float32:  # outside the tensor cores, on operands in registers
        return one(block_m=16, block_k=32, num_stages=2)
    if not is_hopper(x.x.device):
        return one()
    is_narrow = num_columns <= _NARROW
    if num_rows <= 16:
        return one(block_m=16, block_n=16 if is_narrow else 64, num_stages=5)
    if num_rows <= (64 if is_narrow else 32):
        return one(block_m=32, num_stages=4)
    for block_m in (256, 128):
        num_programs = triton.cdiv(num_rows, block_m) * triton.cdiv(num_columns, 128)
        if num_programs >= BUSY:
            return one(block_m=block_m, block_n=128, block_k=64, num_warps=8)
    return one()


def _is_ours(x: Linear) -> bool:
    """Tell by shapes alone whether the kernel is faster than torch."""
    if is_empty(x):
        return False
    (num_rows, depth), num_columns = x.x.shape, sum(x.sizes)
    if num_rows <= _FEW_ROWS and num_columns <= _FEW_COLUMNS:
        return True
    # More of float32 would have to be multiplied outside the tensor cores.
    if num_rows > MAX_ROWS or depth > _MAX_DEPTH or x.x.dtype == torch.float32:
        return False
    is_in_parts = num_rows <= _PART_ROWS and depth >= _PART_DEPTH
    return len(x.weights) > 1 or (is_in_parts and _PART_COLUMNS <= num_columns <= _FEW_COLUMNS)


@triton.jit(do_not_specialize=["M"])
def _linear_kernel(
    x: tl.tensor,
    weights: tl.tuple,
    biases: tl.tuple,
    y: tl.tensor,
    sizes: tl.tuple,
    M: tl.tensor,
    stride_x: tl.tensor,
    stride_y: tl.tensor,
    BIASED: tl.constexpr,  # bit i: weight i has a bias
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS_IN_BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Multiply x by all weights.

    Grid: tiles of BLOCK_N columns of all weights; with ROWS_IN_BLOCKS, blocks of BLOCK_M rows too.
    Loads of x and of a weight are pipelined in STAGES through shared memory.
    """
    index_m = tl.arange(0, BLOCK_M)
    if ROWS_IN_BLOCKS:
        index_m += tl.program_id(1) * BLOCK_M
    store_columns(
        tl.program_id(0), index_m, x, weights, biases, y, sizes, M, stride_x, stride_y, BIASED, K,
        BLOCK_N, BLOCK_K, PARTS, STAGES, EARLY,
    )  # fmt: skip
