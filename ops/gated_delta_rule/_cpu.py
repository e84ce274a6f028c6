"""Both execution forms as C++ kernels: see recurrent.h and chunk.h."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native import load_library


class _Call(ctypes.Structure):
    """The arguments of a kernel; mirrors ``Call`` in call.h field by field."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "q",
                "k",
                "v",
                "g",
                "beta",
                "state",
                "cu_seqlens",
                "state_indices",
                "has_initial_state",
                "out",
                "scratch",
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                "num_tokens",
                "num_seqs",
                "num_k_heads",
                "num_v_heads",
                "k_dim",
                "v_dim",
                "q_stride",
                "k_stride",
                "v_stride",
                "g_stride",
                "beta_stride",
                "chunk_size",
                "num_threads",
            )
        ),
        ("scale", ctypes.c_float),
        ("qk_l2norm", ctypes.c_bool),
        ("is_bf16", ctypes.c_bool),
    )


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
    _library().gated_delta_rule_recurrent(_call(tensors, scale, qk_l2norm, chunk_size=0))
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
    call = _call(tensors, scale, qk_l2norm, chunk_size)
    library = _library()
    scratch = torch.empty(call.num_threads * library.gated_delta_rule_scratch_floats(call))
    call.scratch = scratch.data_ptr()
    library.gated_delta_rule_chunk(call)
    return out


def _call(tensors: tuple[Tensor, ...], scale: float, qk_l2norm: bool, chunk_size: int) -> _Call:
    q, k, v, g, beta, _, _, state_indices, _, _ = tensors
    return _Call(
        *(tensor.data_ptr() for tensor in tensors),
        scratch=None,
        num_tokens=q.shape[0],
        num_seqs=state_indices.shape[0],
        num_k_heads=k.shape[1],
        num_v_heads=v.shape[1],
        k_dim=k.shape[2],
        v_dim=v.shape[2],
        q_stride=q.stride(0),
        k_stride=k.stride(0),
        v_stride=v.stride(0),
        g_stride=g.stride(0),
        beta_stride=beta.stride(0),
        chunk_size=chunk_size,
        num_threads=torch.get_num_threads(),
        scale=scale,
        qk_l2norm=qk_l2norm,
        is_bf16=v.dtype is torch.bfloat16,
    )


@cache
def _library() -> ctypes.CDLL:
    library: ctypes.CDLL = load_library("gated_delta_rule", Path(__file__).with_name("_cpu.cpp"))
    for kernel in (library.gated_delta_rule_recurrent, library.gated_delta_rule_chunk):
        kernel.argtypes, kernel.restype = [ctypes.POINTER(_Call)], None
    library.gated_delta_rule_scratch_floats.argtypes = [ctypes.POINTER(_Call)]
    library.gated_delta_rule_scratch_floats.restype = ctypes.c_int64
    return library
