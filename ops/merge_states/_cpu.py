"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native.call import kernel

_RUN = kernel(
    "merge_states",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="o_a lse_a o_b lse_b out lse",
    integers="rows dim is_bf16 num_threads",
)


def merge_states(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Launcher of ``torch_hybrid::merge_states``."""
    out, lse = o_a.new_empty(o_a.shape), lse_a.new_empty(lse_a.shape)
    _RUN(
        o_a,
        lse_a,
        o_b,
        lse_b,
        out,
        lse,
        lse.numel(),
        o_a.shape[2],
        o_a.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    return out, lse
