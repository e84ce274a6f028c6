"""Both execution forms as C++ kernels: see recurrent.h and chunk.h."""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native import load_library

# ``Call`` in call.h: pointers, sizes and strides, scale, flag. Cheaper to make than a ctypes
# structure of as many fields.
_CALL = struct.Struct("@11P 13q f ?")


def recurrent_ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor | None,
    D: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Walk token by token: each head's state is read once and written once per token."""
    out = v.new_empty(v.shape)
    pool = (state, cu_seqlens, state_indices, has_initial_state)
    _library().ssd_recurrent(_pack(q, k, v, g, dt, D, *pool, out, scale, chunk_size=0))
    return out


def chunk_ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor | None,
    D: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    *,
    scale: float,
    chunk_size: int,
) -> Tensor:
    """Walk chunk by chunk with products of small matrices; a few tokens go the recurrent way."""
    out = v.new_empty(v.shape)
    pool = (state, cu_seqlens, state_indices, has_initial_state)
    call, library = _pack(q, k, v, g, dt, D, *pool, out, scale, chunk_size), _library()
    floats = library.ssd_scratch_floats(call)
    scratch = torch.empty(floats, dtype=torch.float32, device="cpu")
    library.ssd_chunk(call, scratch.data_ptr())
    return out


def _pack(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor | None,
    D: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    out: Tensor,
    scale: float,
    chunk_size: int,
) -> bytes:
    num_tokens, num_groups, k_dim = q.shape
    _, num_heads, v_dim = v.shape
    return _CALL.pack(
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        g.data_ptr(),
        0 if dt is None else dt.data_ptr(),
        0 if D is None else D.data_ptr(),
        state.data_ptr(),
        cu_seqlens.data_ptr(),
        state_indices.data_ptr(),
        has_initial_state.data_ptr(),
        out.data_ptr(),
        num_tokens,
        state_indices.shape[0],
        num_groups,
        num_heads,
        k_dim,
        v_dim,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        g.stride(0),
        0 if dt is None else dt.stride(0),
        chunk_size,
        torch.get_num_threads(),
        scale,
        v.dtype is torch.bfloat16,
    )


@cache
def _library() -> ctypes.CDLL:
    library: ctypes.CDLL = load_library("ssd", Path(__file__).with_name("_cpu.cpp"))
    library.ssd_recurrent.argtypes = [ctypes.c_char_p]
    library.ssd_recurrent.restype = None
    library.ssd_chunk.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    library.ssd_chunk.restype = None
    library.ssd_scratch_floats.argtypes = [ctypes.c_char_p]
    library.ssd_scratch_floats.restype = ctypes.c_int64
    return library
