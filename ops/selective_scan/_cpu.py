"""Both execution forms as one C++ kernel: see _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.core.state_bounds import check_state_indices
from torch_hybrid.ops.native.call import kernel

_SCAN = kernel(
    "selective_scan",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="x dt B C z A_log D state cu_seqlens initial_indices state_indices out",
    integers="num_tokens num_seqs num_slots channels num_groups state_dim "
    "x_stride dt_stride B_stride C_stride z_stride is_bf16 wide_A_log wide_D num_threads",
)


def recurrent_selective_scan(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor | None,
    A_log: Tensor,
    D: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> Tensor:
    """Each thread takes some channels of some sequences, and walks their tokens."""
    num_tokens, channels = x.shape
    out = x.new_empty(x.shape)
    in_range = _SCAN(
        x,
        dt,
        B,
        C,
        z,
        A_log,
        D,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
        out,
        num_tokens,
        state_indices.shape[0],
        state.shape[0],
        channels,
        B.shape[1],
        state.shape[2],
        x.stride(0),
        dt.stride(0),
        B.stride(0),
        C.stride(0),
        0 if z is None else z.stride(0),
        x.dtype is torch.bfloat16,
        A_log.dtype is torch.float32,
        D.dtype is torch.float32,
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


def chunk_selective_scan(*tensors: Tensor, chunk_size: int) -> Tensor:
    """The same: channels are enough for all threads, and walking parts of a sequence side by side
    would compute its exponentials twice."""
    return recurrent_selective_scan(*tensors)
