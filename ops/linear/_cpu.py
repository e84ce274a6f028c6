"""The skinny product of ``_cpu.cpp`` for few rows of x, and torch's own product for many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.linear.by_torch import product_by_torch
from torch_hybrid.ops.native.call import kernel

# Measured, see README.md: past it, torch's product of one weight after the other is faster.
MAX_ROWS = 64

_RUN = kernel(
    "linear",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="x y",
    integers="M K ldx ldy num_weights is_bf16 num_threads",
    row_tensors="weight bias",
    row_integers="rows",
)


def linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """See ``torch_hybrid.ops.linear.op.linear``."""
    num_rows, depth = x.shape
    sizes = [weight.shape[0] for weight in weights]
    y = x.new_empty(num_rows, sum(sizes))
    if num_rows > MAX_ROWS:
        return product_by_torch(x, weights, biases, y)
    rows: list[int] = []
    for weight, bias, size in zip(weights, biases, sizes, strict=True):
        rows += (weight.data_ptr(), 0 if bias is None else bias.data_ptr(), size)
    _RUN(
        x,
        y,
        num_rows,
        depth,
        x.stride(0),
        y.stride(0),
        len(sizes),
        x.dtype is torch.bfloat16,
        torch.get_num_threads(),
        *rows,
    )
    return y
