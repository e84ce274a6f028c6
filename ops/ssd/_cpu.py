"""Both execution forms as C++ kernels: see recurrent.h and chunk.h."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.core.state_bounds import check_state_indices
from torch_hybrid.ops.native.call import kernel


def _kernel(name: str) -> Callable[..., bool]:
    return kernel(
        name,
        Path(__file__).with_name("_cpu.cpp"),
        tensors="q k v g dt D state cu_seqlens initial_indices state_indices out",
        integers="num_tokens num_seqs num_slots num_k_heads num_v_heads k_dim v_dim "
        "q_stride k_stride v_stride g_stride dt_stride chunk_size is_bf16 num_threads",
        numbers="scale",
    )


_RECURRENT, _CHUNK = _kernel("recurrent_ssd"), _kernel("chunk_ssd")


def recurrent_ssd(*tensors: Tensor, scale: float) -> Tensor:
    """Walk token by token: each head's state is read once and written once per token."""
    return _run(_RECURRENT, *tensors, scale=scale, chunk_size=0)


def chunk_ssd(*tensors: Tensor, scale: float, chunk_size: int) -> Tensor:
    """Walk chunk by chunk with products of small matrices; a few tokens go the recurrent way."""
    return _run(_CHUNK, *tensors, scale=scale, chunk_size=chunk_size)


def _run(
    run: Callable[..., bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor | None,
    D: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    scale: float,
    chunk_size: int,
) -> Tensor:
    num_tokens, num_groups, k_dim = q.shape
    _, num_heads, v_dim = v.shape
    out = v.new_empty(v.shape)
    in_range = run(
        q,
        k,
        v,
        g,
        dt,
        D,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
        out,
        num_tokens,
        state_indices.shape[0],
        state.shape[0],
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
        v.dtype is torch.bfloat16,
        torch.get_num_threads(),
        scale,
    )
    if not in_range:
        check_state_indices(
            cu_seqlens,
            initial_indices,
            state_indices,
            num_tokens=num_tokens,
            num_slots=state.shape[0],
        )
    return out
