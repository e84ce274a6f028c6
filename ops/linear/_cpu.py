"""The skinny product of ``_cpu.cpp`` for few rows of x, and torch's own product for many."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_hybrid.ops.native import load_library

# Measured, see README.md: past it, torch's product of one weight after the other is faster.
MAX_ROWS = 64


def linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """See ``torch_hybrid.ops.linear.op.linear``."""
    num_rows, depth = x.shape
    sizes = [weight.shape[0] for weight in weights]
    y = x.new_empty(num_rows, sum(sizes))
    if num_rows > MAX_ROWS:
        return _product_by_torch(x, weights, biases, y)
    arguments = [
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
        num_rows,
        depth,
        x.data_ptr(),
        x.stride(0),
        y.data_ptr(),
        y.stride(0),
        len(sizes),
    ]
    for weight, bias, size in zip(weights, biases, sizes, strict=True):
        arguments += (weight.data_ptr(), 0 if bias is None else bias.data_ptr(), size)
    _kernel()(struct.pack(f"={len(arguments)}q", *arguments))
    return y


def _product_by_torch(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], y: Tensor
) -> Tensor:
    columns = y.split([weight.shape[0] for weight in weights], dim=1)
    for out, weight, bias in zip(columns, weights, biases, strict=True):
        if bias is None:
            torch.mm(x, weight.T, out=out)
        else:
            torch.addmm(bias, x, weight.T, out=out)
    return y


@cache
def _kernel() -> Any:
    kernel = load_library("linear", Path(__file__).with_name("_cpu.cpp")).th_linear
    kernel.argtypes, kernel.restype = [ctypes.c_char_p], None
    return kernel
