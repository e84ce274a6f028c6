"""Both execution forms as C++ kernels: see _cpu.cpp, and delta_rule.h in ops/native."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from torch import Tensor

from torch_hybrid.ops.native.delta_rule import load_delta_rule, run_chunk, run_recurrent


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
    tensors = (q, k, v, g, beta, state, cu_seqlens, state_indices, has_initial_state)
    return run_recurrent(_library(), tensors, scale, qk_l2norm)


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
    tensors = (q, k, v, g, beta, state, cu_seqlens, state_indices, has_initial_state)
    return run_chunk(_library(), tensors, scale, qk_l2norm, chunk_size)


@cache
def _library() -> ctypes.CDLL:
    return load_delta_rule("gated_delta_rule", Path(__file__).with_name("_cpu.cpp"))
