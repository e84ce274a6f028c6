"""Implementation "cpp": copies shared by all threads, over all pools at once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native import load_library
from torch_hybrid.ops.state_copy.pairs import check_pairs


@cache
def _kernel() -> ctypes._NamedFuncPointer:
    library = load_library("state_copy", Path(__file__).with_name("_cpu.cpp"))
    function: ctypes._NamedFuncPointer = library.th_state_copy
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = (pointer, integer, pointer, pointer, integer, integer)
    function.restype = None
    return function


def _shape(pool: Tensor, dim: int) -> tuple[int, int, int, int]:
    """``Pool`` of _cpu.cpp: address, outer size, size along ``dim``, bytes of one index."""
    outer = pool.shape[0] if dim else 1
    return pool.data_ptr(), outer, pool.shape[dim], pool.stride(dim) * pool.element_size()


def state_copy(pools: Sequence[Tensor], src: Tensor, dst: Tensor, *, dim: int) -> None:
    """Launcher of ``torch_hybrid::state_copy``."""
    if not pools:
        return
    targets = dst.tolist()
    check_pairs(src.tolist(), targets, pools[0].shape[dim])
    if not any(targets):
        return
    fields = [field for pool in pools for field in _shape(pool, dim)]
    _kernel()(
        (ctypes.c_int64 * len(fields))(*fields),
        len(pools),
        src.data_ptr(),
        dst.data_ptr(),
        src.numel(),
        torch.get_num_threads(),
    )
