"""The recurrence as a C++ kernel: see _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.core.state_bounds import check_state_indices
from torch_hybrid.ops.native.call import kernel

_RUN = kernel(
    "wkv",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="k v log_decay bonus state cu_seqlens initial_indices state_indices out",
    integers="num_tokens num_seqs num_slots num_channels k_stride v_stride is_bf16 num_threads",
)


def wkv(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> Tensor:
    """Walk the tokens of each sequence, blocks of channels in parallel."""
    num_tokens, num_channels = k.shape
    out = k.new_empty(k.shape)
    in_range = _RUN(
        k,
        v,
        log_decay,
        bonus,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
        out,
        num_tokens,
        state_indices.shape[0],
        state.shape[0],
        num_channels,
        k.stride(0),
        v.stride(0),
        k.dtype is torch.bfloat16,
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
