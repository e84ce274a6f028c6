"""Formats of weights: how the kernels read one, and what they are told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.fused_experts.op import FusedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tile of ``block_n`` rows of weights and ``block_m`` pairs, ``block_k`` columns at a time.

    Shapes alone decide it, so that a captured graph serves any choice of experts.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Format of weights: jit functions by which the kernels read it, and what they are told.

    Attributes:
        stored: describes both weights of an op to the kernels.
        tile: chooses a tile for so many pairs of an expert.
        rows: finds rows of one expert in a weight: their numbers, their scales, and which exist.
        add: adds products of such rows and of tokens to float32 sums, for a tile's columns. Keeps
            what the sums lose to rounding.
        scale: scales finished sums of rows.
        multiply: multiplies such rows by one token outside the tensor cores; nothing is summed.
        multiply_hidden: multiplies rows of one pair's expert by its hidden activations and weight.
    """

    stored: Callable[[FusedExperts], tuple[Stored, Stored]]
    tile: Callable[[FusedExperts, int], Tile]
    rows: Any
    add: Any
    scale: Any
    multiply: Any
    multiply_hidden: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class FewTile:
    """Tile of the kernels of few tokens.

    Attributes:
        rows: of the weight that a program reads side by side.
        columns: that it reads at once.
        shape: of a row's products.
        num_stages: loads on their way at once through shared memory.
        unroll: turns of the loop whose loads are on their way at once in registers.
        num_warps: warps of a program.
    """

    rows: int
    columns: int
    shape: tuple[int, ...]
    num_stages: int | None = None
    unroll: int = 1
    num_warps: int = 4

    def constants(self) -> dict[str, object]:
        """Name the constants of a kernel, and how it is launched."""
        return {
            "SHAPE": (self.rows, *self.shape),
            "BLOCK_N": self.rows,
            "BLOCK_K": self.columns,
            "STAGES": self.num_stages,
            "UNROLL": self.unroll,
            "num_warps": self.num_warps,
            "enable_fp_fusion": True,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A weight as the kernels are given it.

    Attributes:
        numbers: tensor of the weight.
        scales: tensor of its scales, where it has such.
        form: constants of the loader.
        few: tile of the kernels of few tokens.
    """

    numbers: Tensor
    scales: Tensor | None
    form: tuple[int | bool, ...]
    few: FewTile


@triton.jit
def unscaled(acc: tl.tensor, rows: tl.tuple, FORM: tl.constexpr) -> tl.tensor:
    """Return finished sums, which have no scales, or whose products were scaled."""
    return acc
