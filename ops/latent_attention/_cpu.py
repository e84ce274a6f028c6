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
    torch.float32: "th_latent_attention_f32",
    torch.bfloat16: "th_latent_attention_bf16",
}


class _Call(ctypes.Structure):
    """Mirror of ``th::Call`` in _cpu.cpp."""

    _fields_ = (
        *PAGES_FIELDS,
        *((name, ctypes.c_void_p) for name in ("q_latent", "q_rope", "latent", "k_rope")),
        *((name, ctypes.c_void_p) for name in ("pool", "out", "lse")),
        *((name, ctypes.c_int64) for name in ("q_latent_token", "q_latent_head")),
        *((name, ctypes.c_int64) for name in ("q_rope_token", "q_rope_head")),
        *((name, ctypes.c_int64) for name in ("latent_token", "k_rope_token")),
        *((name, ctypes.c_int64) for name in ("num_heads", "rank", "rope_dim", "num_threads")),
        ("scale", ctypes.c_double),
    )


@cache
def _kernel(dtype: torch.dtype) -> Callable[[_Call], bool]:
    library = load_library("latent_attention", Path(__file__).with_name("_cpu.cpp"))
    function: ctypes._NamedFuncPointer = library[_SYMBOLS[dtype]]
    function.argtypes = (ctypes.POINTER(_Call),)
    function.restype = ctypes.c_bool
    return function


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    pool: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Launcher of ``torch_hybrid::latent_attention``."""
    index = (cu_seqlens, seq_lens, page_table, slot_mapping)
    return _launch(q_latent, q_rope, latent, k_rope, pool, *index, scale, None)


def latent_attention_with_lse(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    pool: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``torch_hybrid::latent_attention_with_lse``."""
    lse = torch.empty(q_latent.shape[:2], dtype=torch.float32)
    index = (cu_seqlens, seq_lens, page_table, slot_mapping)
    return _launch(q_latent, q_rope, latent, k_rope, pool, *index, scale, lse), lse


def _launch(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    pool: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    scale: float,
    lse: Tensor | None,
) -> Tensor:
    num_pages, page_size, _ = pool.shape
    index = (cu_seqlens, seq_lens, page_table, slot_mapping)
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype)
    call = _Call(
        *pages_values(*index, num_pages, page_size),
        q_latent.data_ptr(),
        q_rope.data_ptr(),
        latent.data_ptr(),
        k_rope.data_ptr(),
        pool.data_ptr(),
        out.data_ptr(),
        None if lse is None else lse.data_ptr(),
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
        latent.stride(0),
        k_rope.stride(0),
        *q_latent.shape[1:],
        q_rope.shape[2],
        torch.get_num_threads(),
        scale,
    )
    if not _kernel(q_latent.dtype)(call):
        check_page_indices(*index, num_pages=num_pages, page_size=page_size)
    return out
