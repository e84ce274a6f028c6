"""The convolution as a C++ kernel: see _cpu.cpp."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native import load_library


class _Call(ctypes.Structure):
    """The arguments of the kernel; mirrors ``Call`` in _cpu.cpp field by field."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("conv_state", ctypes.c_void_p),
        ("cu_seqlens", ctypes.c_void_p),
        ("state_indices", ctypes.c_void_p),
        ("has_initial_state", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("num_seqs", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("silu", ctypes.c_bool),
        ("is_bf16", ctypes.c_bool),
    )


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
    out = torch.empty(x.shape, dtype=x.dtype)
    call = _Call(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        conv_state=conv_state.data_ptr(),
        cu_seqlens=cu_seqlens.data_ptr(),
        state_indices=state_indices.data_ptr(),
        has_initial_state=has_initial_state.data_ptr(),
        out=out.data_ptr(),
        num_tokens=x.shape[0],
        num_seqs=state_indices.shape[0],
        channels=x.shape[1],
        width=weight.shape[1],
        x_stride=x.stride(0),
        num_threads=torch.get_num_threads(),
        silu=activation == "silu",
        is_bf16=x.dtype is torch.bfloat16,
    )
    _library().causal_conv1d(call)
    return out


@cache
def _library() -> ctypes.CDLL:
    library: ctypes.CDLL = load_library("causal_conv1d", Path(__file__).with_name("_cpu.cpp"))
    library.causal_conv1d.argtypes = [ctypes.POINTER(_Call)]
    library.causal_conv1d.restype = None
    return library
