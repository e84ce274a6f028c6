"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.gated_pooling.bounds import check_indices
from torch_hybrid.ops.native.call import kernel

_RUN = kernel(
    "gated_pooling",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="keys gates bias state cu_seqlens seq_lens initial_indices state_indices out",
    integers="num_tokens num_seqs num_slots dim block_size keys_stride gates_stride "
    "is_bf16 num_threads",
)


def gated_pooling(
    keys: Tensor,
    gates: Tensor,
    bias: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> Tensor:
    """Launcher of ``torch_hybrid::gated_pooling``."""
    out = keys.new_empty(keys.shape)
    in_range = _RUN(
        keys,
        gates,
        bias,
        state,
        cu_seqlens,
        seq_lens,
        initial_indices,
        state_indices,
        out,
        keys.shape[0],
        state_indices.shape[0],
        state.shape[0],
        keys.shape[1],
        bias.shape[0],
        keys.stride(0),
        gates.stride(0),
        keys.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    if not in_range:
        check_indices(
            cu_seqlens,
            seq_lens,
            initial_indices,
            state_indices,
            num_tokens=keys.shape[0],
            num_slots=state.shape[0],
        )
    return out
