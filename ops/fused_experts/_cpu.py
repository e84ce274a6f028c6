"""The experts in C++: each hit expert's weights are read from memory once, for all its tokens."""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_hybrid.ops.native import load_library

# Of tokens in one go: it bounds the hidden activations, and their experts' weights are read anew.
MAX_TOKENS = 2048


def fused_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: str,
) -> Tensor:
    """See ``torch_hybrid.ops.fused_experts.op.fused_experts``."""
    out = x.new_empty(x.shape)
    num_tokens, top_k = expert_ids.shape
    hidden = x.new_empty(min(num_tokens, MAX_TOKENS) * top_k, down.shape[2])
    for first in range(0, num_tokens, MAX_TOKENS):
        block = slice(first, first + MAX_TOKENS)
        _run(
            x[block],
            expert_ids[block],
            expert_weights[block],
            gate_up,
            down,
            hidden,
            out[block],
            has_gate=activation == "silu",
        )
    return out


def _run(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    hidden: Tensor,
    out: Tensor,
    *,
    has_gate: bool,
) -> None:
    arguments = (
        x.dtype == torch.bfloat16,
        expert_ids.dtype == torch.int64,
        expert_weights.dtype == torch.float32,
        has_gate,
        torch.get_num_threads(),
        *expert_ids.shape,
        *down.shape,
        x.data_ptr(),
        x.stride(0),
        expert_ids.data_ptr(),
        expert_weights.data_ptr(),
        gate_up.data_ptr(),
        down.data_ptr(),
        hidden.data_ptr(),
        out.data_ptr(),
    )
    _kernel()(struct.pack(f"={len(arguments)}q", *arguments))


@cache
def _kernel() -> Any:
    kernel = load_library("fused_experts", Path(__file__).with_name("_cpu.cpp")).th_fused_experts
    kernel.argtypes, kernel.restype = [ctypes.c_char_p], None
    return kernel
