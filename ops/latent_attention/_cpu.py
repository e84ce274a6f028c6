"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.latent_attention.validate import check_gathered_slots, check_new_slots
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


class _Pool(ctypes.Structure):
    """Mirror of ``th::Pool`` in rows.h."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row_bytes", "page_size", "num_slots")),
    )


class _NewRows(ctypes.Structure):
    """Mirror of ``th::NewRows`` in rows.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("latent", "k_rope")),
        *((name, ctypes.c_int64) for name in ("latent_stride", "latent_bytes")),
        *((name, ctypes.c_int64) for name in ("k_rope_stride", "k_rope_bytes")),
    )


_ARGUMENTS: dict[str, tuple[type[ctypes._CDataType], ...]] = {
    "th_latent_attention_f32": (ctypes.POINTER(_Call),),
    "th_latent_attention_bf16": (ctypes.POINTER(_Call),),
    "th_store_latents": (
        ctypes.POINTER(_NewRows),
        ctypes.POINTER(_Pool),
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int64,
    ),
    "th_gather_latents": (
        ctypes.POINTER(_Pool),
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_int64,
    ),
}


@cache
def _kernel(symbol: str) -> Callable[..., bool]:
    library = load_library("latent_attention", Path(__file__).with_name("_cpu.cpp"))
    function: ctypes._NamedFuncPointer = library[symbol]
    function.argtypes = _ARGUMENTS[symbol]
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
    lse = q_latent.new_empty(q_latent.shape[:2], dtype=torch.float32)
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
    out = q_latent.new_empty(q_latent.shape)
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
    if not _kernel(_SYMBOLS[q_latent.dtype])(call):
        check_page_indices(*index, num_pages=num_pages, page_size=page_size)
    return out


def store_latents(
    latent: Tensor, k_rope: Tensor, pool: Tensor, slot_mapping: Tensor, cu_seqlens: Tensor
) -> None:
    """Launcher of ``torch_hybrid::store_latents``."""
    item = latent.element_size()
    rows = _NewRows(
        latent.data_ptr(),
        k_rope.data_ptr(),
        latent.stride(0) * item,
        latent.shape[1] * item,
        k_rope.stride(0) * item,
        k_rope.shape[1] * item,
    )
    num_tokens = cu_seqlens[-1:]
    stored = _kernel("th_store_latents")(
        rows,
        _pool(pool),
        slot_mapping.data_ptr(),
        slot_mapping.shape[0],
        num_tokens.data_ptr(),
        torch.get_num_threads(),
    )
    if not stored:
        check_new_slots(slot_mapping, cu_seqlens, pool)


def gather_latents(pool: Tensor, rows: Tensor) -> Tensor:
    """Launcher of ``torch_hybrid::gather_latents``."""
    out = pool.new_empty(rows.shape[0], pool.shape[2])
    arguments = (rows.data_ptr(), rows.shape[0], out.data_ptr(), torch.get_num_threads())
    if not _kernel("th_gather_latents")(_pool(pool), *arguments):
        check_gathered_slots(rows, pool)
    return out


def _pool(pool: Tensor) -> _Pool:
    num_pages, page_size, width = pool.shape
    row_bytes = width * pool.element_size()
    return _Pool(pool.data_ptr(), row_bytes, page_size, num_pages * page_size)
