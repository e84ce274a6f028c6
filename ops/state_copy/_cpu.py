"""Implementation "cpp": copies shared by all threads, over all pools at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native.call import kernel
from torch_hybrid.ops.state_copy.pairs import check_pairs

_RUN = kernel(
    "state_copy",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="src dst",
    integers="num_pools num_pairs num_threads",
    row_tensors="data",
    row_integers="outer size bytes",
)


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
    _RUN(
        src,
        dst,
        len(pools),
        src.numel(),
        torch.get_num_threads(),
        *(field for pool in pools for field in _shape(pool, dim)),
    )
