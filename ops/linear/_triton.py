# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton": all weights of one input in one launch, for few rows.

Such a product is its weights' way from memory. One launch has all weights on their way at once,
where one after the other each waits for memory anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.formats import block_scales
from torch_hybrid.ops.linear._triton_columns import store_columns
from torch_hybrid.ops.linear._triton_fp8 import fp8_linear
from torch_hybrid.ops.linear._triton_integers import integer_linear
from torch_hybrid.ops.linear.by_torch import empty_columns, product_by_torch
from torch_hybrid.ops.triton.devices import is_hopper

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
# Of batch-invariant products: columns that are too few programs of 64, and programs of large tiles
# that are not; with fewer of them, small ones are faster.
_NARROW = 2048
_BUSY = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows of x and of a weight that a program multiplies, ``block_k`` columns at a time in each of
    ``num_parts`` parts side by side. ``any_rows``: there are programs for further rows too.

    Decided by shapes alone: a row's sums are in the same order whatever the other rows hold.
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_parts: int = 1
    num_warps: int = 4
    any_rows: bool = False

    @classmethod
    def of(cls, num_rows: int, num_columns: int, depth: int) -> Tile:
        """For that many rows of x, and columns of all weights' results, of sums so deep."""
        if num_rows <= _FEW_ROWS and num_columns <= _FEW_COLUMNS:
            block_m = triton.next_power_of_2(num_rows)
            return cls(block_m=block_m, block_n=4, block_k=512, num_stages=4)
        if num_rows <= _PART_ROWS and num_columns <= _FEW_COLUMNS and depth >= _PART_DEPTH:
            block_m = 16 if num_rows <= 16 else 32
            return cls(block_m=block_m, block_n=16, block_k=128, num_stages=4, num_parts=4)
        block_m, stages = (16, 5) if num_rows <= 16 else (32, 4) if num_rows <= 32 else (64, 3)
        return cls(block_m=block_m, block_n=64, block_k=128, num_stages=stages)

    @classmethod
    def of_any_rows(cls, num_rows: int, num_columns: int, like: Tensor) -> Tile:
        """Of rows cut in blocks, for inputs of the dtype and device of ``like``: all of these tiles
        sum a row in one order.

        A sum goes along the depth, 16 numbers after 16 on tensor cores, whatever else a tile has;
        that is so where it was tried, on Hopper, and elsewhere there is one tile.
        """
        one = partial(cls, block_m=64, block_n=64, block_k=128, num_stages=3, any_rows=True)
        if like.dtype == torch.float32:  # outside the tensor cores, on operands in registers
            return one(block_m=16, block_k=32, num_stages=2)
        if not is_hopper(like.device):
            return one()
        is_narrow = num_columns <= _NARROW
        if num_rows <= 16:
            return one(block_m=16, block_n=16 if is_narrow else 64, num_stages=5)
        if num_rows <= (64 if is_narrow else 32):
            return one(block_m=32, num_stages=4)
        for block_m in (256, 128):
            num_programs = triton.cdiv(num_rows, block_m) * triton.cdiv(num_columns, 128)
            if num_programs >= _BUSY:
                return one(block_m=block_m, block_n=128, block_k=64, num_warps=8)
        return one()


def linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    scales: Sequence[Tensor] | None = None,
) -> Tensor:
    """See ``torch_hybrid.ops.linear.op.linear``."""
    if scales is not None:
        is_fp8 = weights[0].dtype == block_scales.DTYPE
        return (fp8_linear if is_fp8 else integer_linear)(x, weights, biases, scales)
    num_rows, depth = x.shape
    sizes = tuple(weight.shape[0] for weight in weights)
    y = empty_columns(x, sizes)
    if not _is_ours(x, sizes):
        return product_by_torch(x, weights, biases, y)
    _multiply(x, weights, biases, y, Tile.of(num_rows, sum(sizes), depth))
    return y


def invariant_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    scales: Sequence[Tensor] | None = None,
) -> Tensor:
    """Implementation "triton_invariant": any number of rows in one order of sums."""
    assert scales is None
    y = x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights))
    if y.numel():
        _multiply(x, weights, biases, y, Tile.of_any_rows(x.shape[0], y.shape[1], x))
    return y


def _multiply(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    y: Tensor,
    tile: Tile,
) -> None:
    """Fill ``y``, which has elements."""
    num_rows, depth = x.shape
    sizes = tuple(weight.shape[0] for weight in weights)
    column_blocks = sum(triton.cdiv(size, tile.block_n) for size in sizes)
    _linear_kernel[(column_blocks, triton.cdiv(num_rows, tile.block_m))](
        x,
        tuple(weights),
        # In the place of a bias that is not there stands a tensor that is not read.
        tuple(x if bias is None else bias for bias in biases),
        y,
        sizes,
        num_rows,
        x.stride(0),
        y.stride(0),
        BIASED=sum(1 << i for i, bias in enumerate(biases) if bias is not None),
        K=depth,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        PARTS=tile.num_parts,
        STAGES=tile.num_stages,
        ROWS_IN_BLOCKS=tile.any_rows,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
    )


def _is_ours(x: Tensor, sizes: Sequence[int]) -> bool:
    """Whether the kernel is the faster way, by shapes alone."""
    num_rows, depth = x.shape
    if num_rows == 0 or depth == 0 or sum(sizes) == 0:
        return False
    if num_rows <= _FEW_ROWS and sum(sizes) <= _FEW_COLUMNS:
        return True
    # More of float32 would have to be multiplied outside the tensor cores.
    if num_rows > MAX_ROWS or depth > _MAX_DEPTH or x.dtype == torch.float32:
        return False
    is_in_parts = num_rows <= _PART_ROWS and depth >= _PART_DEPTH
    return len(sizes) > 1 or (is_in_parts and _PART_COLUMNS <= sum(sizes) <= _FEW_COLUMNS)


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
) -> None:
    """One program: BLOCK_N columns of all rows of y, or of BLOCK_M of them."""
    index_m = tl.arange(0, BLOCK_M)
    if ROWS_IN_BLOCKS:
        index_m += tl.program_id(1) * BLOCK_M
    store_columns(
        tl.program_id(0), index_m, x, weights, biases, y, sizes, M, stride_x, stride_y, BIASED, K,
        BLOCK_N, BLOCK_K, PARTS, STAGES,
    )  # fmt: skip
