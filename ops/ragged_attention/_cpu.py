"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native import load_library
from torch_hybrid.ops.ragged_attention.bounds import check_offsets

_SYMBOLS = {
    torch.float32: "th_ragged_attention_f32",
    torch.bfloat16: "th_ragged_attention_bf16",
}


class _Call(ctypes.Structure):
    """Mirror of ``th::Call`` in _cpu.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse")),
        *((name, ctypes.c_void_p) for name in ("cu_seqlens_q", "cu_seqlens_k")),
        *((name, ctypes.c_int64) for name in ("q_token", "q_head", "k_token", "k_head")),
        *((name, ctypes.c_int64) for name in ("v_token", "v_head", "num_queries", "num_keys")),
        *((name, ctypes.c_int64) for name in ("num_seqs", "num_heads", "num_k_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "v_head_dim", "causal")),
        ("num_threads", ctypes.c_int64),
        ("scale", ctypes.c_double),
    )


@cache
def _kernel(dtype: torch.dtype) -> Callable[[_Call], bool]:
    library = load_library("ragged_attention", Path(__file__).with_name("_cpu.cpp"))
    function: ctypes._NamedFuncPointer = library[_SYMBOLS[dtype]]
    function.argtypes = (ctypes.POINTER(_Call),)
    function.restype = ctypes.c_bool
    return function


def ragged_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``torch_hybrid::ragged_attention_with_lse``."""
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_k_heads, v_head_dim = v.shape
    out = q.new_empty(num_queries, num_heads, v_head_dim)
    lse = q.new_empty(num_queries, num_heads, dtype=torch.float32)
    call = _Call(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        cu_seqlens_q.data_ptr(),
        cu_seqlens_k.data_ptr(),
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        num_queries,
        num_keys,
        cu_seqlens_q.shape[0] - 1,
        num_heads,
        num_k_heads,
        head_dim,
        v_head_dim,
        causal,
        torch.get_num_threads(),
        scale,
    )
    if not _kernel(q.dtype)(call):
        check_offsets(q, k, cu_seqlens_q, cu_seqlens_k)
    return out, lse
