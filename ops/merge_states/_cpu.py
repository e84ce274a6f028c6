"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native import load_library

_SYMBOLS = {
    torch.float32: "th_merge_states_f32",
    torch.bfloat16: "th_merge_states_bf16",
}


@cache
def _kernel(dtype: torch.dtype) -> Callable[..., None]:
    library = load_library("merge_states", Path(__file__).with_name("_cpu.cpp"))
    function: ctypes._NamedFuncPointer = library[_SYMBOLS[dtype]]
    function.argtypes = (*[ctypes.c_void_p] * 6, *[ctypes.c_int64] * 3)
    function.restype = None
    return function


def merge_states(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Launcher of ``torch_hybrid::merge_states``."""
    out = o_a.new_empty(o_a.shape)
    lse = lse_a.new_empty(lse_a.shape)
    tensors = (o_a, lse_a, o_b, lse_b, out, lse)
    _kernel(o_a.dtype)(
        *(tensor.data_ptr() for tensor in tensors),
        lse.numel(),
        o_a.shape[2],
        torch.get_num_threads(),
    )
    return out, lse
