"""The convolution as a C++ kernel: see _cpu.cpp."""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native import load_library

# ``Call`` in _cpu.cpp: pointers, sizes and the stride of x, flags. Cheaper to make than a ctypes
# structure of as many fields.
_CALL = struct.Struct("@8P 6q 2?")


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    *,
    activation: str,
) -> Tensor:
    """Convolve blocks of tokens and channels in parallel, then write the states."""
    out = x.new_empty(x.shape)
    call = _CALL.pack(
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        conv_state.data_ptr(),
        cu_seqlens.data_ptr(),
        state_indices.data_ptr(),
        has_initial_state.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        state_indices.shape[0],
        x.shape[1],
        weight.shape[1],
        x.stride(0),
        torch.get_num_threads(),
        activation == "silu",
        x.dtype is torch.bfloat16,
    )
    _library().causal_conv1d(call)
    return out


@cache
def _library() -> ctypes.CDLL:
    library: ctypes.CDLL = load_library("causal_conv1d", Path(__file__).with_name("_cpu.cpp"))
    library.causal_conv1d.argtypes = [ctypes.c_char_p]
    library.causal_conv1d.restype = None
    return library
