"""Implementation "cpp": copies shared by all threads, over all pools at once."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native.call import kernel
from torch_hybrid.ops.state_copy.op import StateCopy

_RUN = kernel(
    "state_copy",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="src dst",
    integers="num_pools num_pairs num_threads",
    row_tensors="data",
    row_integers="outer size bytes",
)


def _shape(pool: Tensor, dim: int) -> tuple[int, int, int, int]:
    """Describe a pool as _cpu.cpp does: address, outer size, size along ``dim``, bytes an index."""
    outer = pool.shape[0] if dim else 1
    return pool.data_ptr(), outer, pool.shape[dim], pool.stride(dim) * pool.element_size()


def state_copy(x: StateCopy) -> None:
    """Copy in C++, unless there is nothing to copy."""
    if not x.pools or not any(x.dst.tolist()):
        return
    _RUN(
        x.src,
        x.dst,
        len(x.pools),
        x.src.numel(),
        torch.get_num_threads(),
        *(field for pool in x.pools for field in _shape(pool, x.dim)),
    )
