"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native import load_library
from torch_hybrid.ops.native.pages import PAGES_FIELDS, pages_values
from torch_hybrid.ops.page_bounds import check_page_indices

_SYMBOLS = {
    torch.float32: "th_paged_attention_f32",
    torch.bfloat16: "th_paged_attention_bf16",
}


class _Call(ctypes.Structure):
    """Mirror of ``th::Call`` in problem.h."""

    _fields_ = (
        *PAGES_FIELDS,
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "kv", "out", "lse")),
        *((name, ctypes.c_int64) for name in ("q_token", "q_head", "k_token", "k_head")),
        *((name, ctypes.c_int64) for name in ("v_token", "v_head", "num_q_heads")),
        *((name, ctypes.c_int64) for name in ("num_kv_heads", "head_dim", "window")),
        ("num_threads", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
    )


@cache
def _kernel(dtype: torch.dtype) -> Callable[[_Call], bool]:
    library = load_library("paged_attention", Path(__file__).with_name("_cpu.cpp"))
    function: ctypes._NamedFuncPointer = library[_SYMBOLS[dtype]]
    function.argtypes = (ctypes.POINTER(_Call),)
    function.restype = ctypes.c_bool
    return function


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Launcher of ``torch_hybrid::paged_attention``."""
    index = (cu_seqlens, seq_lens, page_table, slot_mapping)
    return _launch(q, k, v, kv, *index, scale, window, softcap, None)


def paged_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``torch_hybrid::paged_attention_with_lse``."""
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    index = (cu_seqlens, seq_lens, page_table, slot_mapping)
    return _launch(q, k, v, kv, *index, scale, window, softcap, lse), lse


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    scale: float,
    window: int,
    softcap: float,
    lse: Tensor | None,
) -> Tensor:
    _, num_pages, page_size, num_kv_heads, _ = kv.shape
    out = q.new_empty(q.shape)
    call = _Call(
        *pages_values(cu_seqlens, seq_lens, page_table, slot_mapping, num_pages, page_size),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        kv.data_ptr(),
        out.data_ptr(),
        None if lse is None else lse.data_ptr(),
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        q.shape[1],
        num_kv_heads,
        q.shape[2],
        window,
        torch.get_num_threads(),
        scale,
        softcap,
    )
    if not _kernel(q.dtype)(call):
        check_page_indices(
            cu_seqlens,
            seq_lens,
            page_table,
            slot_mapping,
            num_pages=num_pages,
            page_size=page_size,
            window=window,
        )
    return out
