"""Formats of weights: how the kernels read one, and what they are told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Jit functions by which the kernels read weights of a format.

    Attributes:
        rows: finds rows of one expert in a weight: their numbers, their scales, and which exist.
        add: adds products of such rows and of tokens to float32 sums, for a tile's columns. Keeps
            what the sums lose to rounding.
        scale: scales finished sums of rows.
        multiply: multiplies such rows by one token outside the tensor cores; nothing is summed.
        multiply_hidden: multiplies rows of one pair's expert by its hidden activations and weight.
    """

    rows: Any
    add: Any
    scale: Any
    multiply: Any
    multiply_hidden: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A weight as the kernels are given it.

    Attributes:
        numbers: tensor of the weight.
        scales: tensor of its scales, where it has such.
        form: constants of the loader.
        few_block: columns that a program reads at once, for few tokens.
        few_shape: of their products, after the rows.
    """

    numbers: Tensor
    scales: Tensor | None
    form: tuple[int | bool, ...]
    few_block: int
    few_shape: tuple[int, ...]


@triton.jit
def unscaled(acc: tl.tensor, rows: tl.tuple, FORM: tl.constexpr) -> tl.tensor:
    """Return finished sums, which have no scales, or whose products were scaled."""
    return acc
