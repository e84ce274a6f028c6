"""Both execution forms as C++ kernels: see recurrent.h and chunk.h."""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native import load_library

# ``Call`` in call.h: pointers, sizes and strides, scale, flags. Cheaper to make than a ctypes
# structure of as many fields.
_CALL = struct.Struct("@10P 13q f 2?")


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    *,
    scale: float,
    qk_l2norm: bool,
) -> Tensor:
    """Walk token by token: each head's state is read once and written once per token."""
    out = torch.empty(v.shape, dtype=v.dtype)
    tensors = (q, k, v, g, beta, state, cu_seqlens, state_indices, has_initial_state, out)
    _library().gated_delta_rule_recurrent(_pack(tensors, scale, qk_l2norm, chunk_size=0))
    return out


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    *,
    scale: float,
    qk_l2norm: bool,
    chunk_size: int,
) -> Tensor:
    """Walk chunk by chunk with products of small matrices; a few tokens go the recurrent way."""
    out = torch.empty(v.shape, dtype=v.dtype)
    tensors = (q, k, v, g, beta, state, cu_seqlens, state_indices, has_initial_state, out)
    call, library = _pack(tensors, scale, qk_l2norm, chunk_size), _library()
    scratch = torch.empty(library.gated_delta_rule_scratch_floats(call))
    library.gated_delta_rule_chunk(call, scratch.data_ptr())
    return out


def _pack(tensors: tuple[Tensor, ...], scale: float, qk_l2norm: bool, chunk_size: int) -> bytes:
    q, k, v, g, beta, _, _, state_indices, _, _ = tensors
    num_tokens, num_k_heads, k_dim = q.shape
    _, num_v_heads, v_dim = v.shape
    return _CALL.pack(
        *(tensor.data_ptr() for tensor in tensors),
        num_tokens,
        state_indices.shape[0],
        num_k_heads,
        num_v_heads,
        k_dim,
        v_dim,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        g.stride(0),
        beta.stride(0),
        chunk_size,
        torch.get_num_threads(),
        scale,
        qk_l2norm,
        v.dtype is torch.bfloat16,
    )


@cache
def _library() -> ctypes.CDLL:
    library: ctypes.CDLL = load_library("gated_delta_rule", Path(__file__).with_name("_cpu.cpp"))
    library.gated_delta_rule_recurrent.argtypes = [ctypes.c_char_p]
    library.gated_delta_rule_recurrent.restype = None
    library.gated_delta_rule_chunk.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    library.gated_delta_rule_chunk.restype = None
    library.gated_delta_rule_scratch_floats.argtypes = [ctypes.c_char_p]
    library.gated_delta_rule_scratch_floats.restype = ctypes.c_int64
    return library
