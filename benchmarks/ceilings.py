"""What the machine gives at best, as contestants beside a kernel: a read, and a matrix product."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from torch_hybrid.ops.native import load_library

MATRIX = 2048


def reader(num_bytes: int) -> Callable[[], object]:
    """Reads a buffer of this size with all threads."""
    read = load_library("benchmark_read", Path(__file__).with_name("_read.cpp")).th_read
    read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    buffer, threads = torch.ones(num_bytes // 4), torch.get_num_threads()
    return lambda: read(buffer.data_ptr(), buffer.numel(), threads)


def product(dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    """A large matrix product, and its FLOPs."""
    a = torch.randn(MATRIX, MATRIX).to(dtype)
    return lambda: a @ a, 2 * MATRIX**3
