"""Tiles of the Triton kernels, and what a launch of any of them is given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from torch_hybrid.ops.linear.op import Linear
from torch_hybrid.ops.triton.devices import is_hopper

# Programs of large tiles; with fewer of them, small ones are faster.
BUSY = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows of x and of a weight that a program multiplies.

    Shapes alone decide it: a row's sums are in the same order whatever the other rows hold.

    Attributes:
        block_m: rows of x.
        block_n: rows of a weight, which are columns of the result.
        block_k: columns of both at a time, in each part.
        num_stages: loads on their way at once.
        num_parts: parts of the depth side by side; each warp sums one.
        num_warps: warps of a program.
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_parts: int = 1
    num_warps: int = 4

    def grid(self, x: Linear) -> tuple[int, int]:
        """Count the programs: tiles of all weights' columns, and blocks of rows."""
        num_tiles = sum(triton.cdiv(size, self.block_n) for size in x.sizes)
        return num_tiles, triton.cdiv(x.x.shape[0], self.block_m)

    def options(self, x: Linear) -> dict[str, int]:
        """Name the constants of a kernel, and how it is launched."""
        return {
            "BIASED": sum(1 << i for i, bias in enumerate(x.biases) if bias is not None),
            "K": x.x.shape[1],
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "PARTS": self.num_parts,
            "STAGES": self.num_stages,
            "num_warps": self.num_warps,
            "enable_fp_fusion": True,
        }


def tile_of_any_rows(x: Linear) -> Tile:
    """Choose the tile of rows in blocks, by weights with scales, in one order of sums.

    128 columns are summed at a time, 16 products after 16 on tensor cores. That other tiles sum so
    was tried on Hopper; elsewhere there is one.
    """
    num_rows = x.x.shape[0]
    if x.x.dtype == torch.float32:  # outside the tensor cores, on operands in registers
        return Tile(block_m=16, block_n=32, block_k=32, num_stages=2)
    one = partial(Tile, block_m=64, block_n=64, block_k=128, num_stages=3)
    if not is_hopper(x.x.device):
        return one()
    if num_rows <= 32:
        block_m, stages = (16, 5) if num_rows <= 16 else (32, 4)
        return one(block_m=block_m, num_stages=stages)
    large = one(block_m=128, block_n=128, num_warps=8)
    return large if math.prod(large.grid(x)) >= BUSY else one()


def readable_biases(x: Linear) -> tuple[Tensor, ...]:
    """Put a tensor that no program reads in the place of each bias that is not there."""
    return tuple(x.x if bias is None else bias for bias in x.biases)


def is_empty(x: Linear) -> bool:
    """Tell whether there is nothing to multiply."""
    return 0 in (*x.x.shape, sum(x.sizes))
