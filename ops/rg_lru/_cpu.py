"""The recurrence as a C++ kernel: see _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.core.state_bounds import check_state_indices
from torch_hybrid.ops.native.call import kernel

_RUN = kernel(
    "rg_lru",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="x gates log_a state cu_seqlens initial_indices state_indices out",
    integers="num_tokens num_seqs num_slots num_heads head_dim x_stride gates_stride "
    "gates_head_stride is_bf16 num_threads",
)


def rg_lru(
    x: Tensor,
    gates: Tensor,
    log_a: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> Tensor:
    """Walk the tokens of each sequence, blocks of channels in parallel."""
    num_tokens, channels = x.shape
    num_heads = gates.shape[1]
    out = x.new_empty(x.shape)
    in_range = _RUN(
        x,
        gates,
        log_a,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
        out,
        num_tokens,
        state_indices.shape[0],
        state.shape[0],
        num_heads,
        channels // num_heads,
        x.stride(0),
        gates.stride(0),
        gates.stride(1),
        x.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    if not in_range:
        check_state_indices(
            cu_seqlens,
            initial_indices,
            state_indices,
            num_tokens=num_tokens,
            num_slots=state.shape[0],
        )
    return out
