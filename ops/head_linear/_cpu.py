"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native.call import kernel

_RUN = kernel(
    "head_linear",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="x weight out",
    integers="T H N K x_token x_head weight_head weight_row weight_column is_bf16 num_threads",
)


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Launcher of ``torch_hybrid::head_linear``."""
    num_tokens, num_heads, depth = x.shape
    out = x.new_empty(num_tokens, num_heads, weight.shape[1])
    _RUN(
        x,
        weight,
        out,
        num_tokens,
        num_heads,
        weight.shape[1],
        depth,
        x.stride(0),
        x.stride(1),
        *weight.stride(),
        x.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    return out
