"""Calls the C++ library of a delta rule (delta_rule.h): the same for every rule of decay."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native.build import load_library

# ``Call`` in delta_rule_call.h: pointers, sizes and strides, scale, flags. Cheaper to make than a
# ctypes structure of as many fields.
_CALL = struct.Struct("@10P 13q f 2?")


def load_delta_rule(name: str, source: Path) -> ctypes.CDLL:
    """Build and load a library that TH_EXPORT_DELTA_RULE makes."""
    library = load_library(name, source)
    library.delta_rule_recurrent.argtypes = [ctypes.c_char_p]
    library.delta_rule_recurrent.restype = None
    library.delta_rule_chunk.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    library.delta_rule_chunk.restype = None
    library.delta_rule_scratch_floats.argtypes = [ctypes.c_char_p]
    library.delta_rule_scratch_floats.restype = ctypes.c_int64
    return library


def run_recurrent(
    library: ctypes.CDLL, tensors: tuple[Tensor, ...], scale: float, qk_l2norm: bool
) -> Tensor:
    """Walk token by token; ``tensors`` are those of the op, in its order."""
    v = tensors[2]
    out = v.new_empty(v.shape)
    library.delta_rule_recurrent(_pack((*tensors, out), scale, qk_l2norm, chunk_size=0))
    return out


def run_chunk(
    library: ctypes.CDLL,
    tensors: tuple[Tensor, ...],
    scale: float,
    qk_l2norm: bool,
    chunk_size: int,
) -> Tensor:
    """Walk chunk by chunk; ``tensors`` are those of the op, in its order."""
    v = tensors[2]
    out = v.new_empty(v.shape)
    call = _pack((*tensors, out), scale, qk_l2norm, chunk_size)
    floats = library.delta_rule_scratch_floats(call)
    scratch = torch.empty(floats, dtype=torch.float32, device="cpu")
    library.delta_rule_chunk(call, scratch.data_ptr())
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
