"""Calls the C++ library of a delta rule (delta_rule.h): the same for every rule of decay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.core.state_bounds import check_state_indices
from torch_hybrid.ops.native.call import kernel


def delta_rule_kernel(name: str, source: Path) -> Callable[..., bool]:
    """One of the functions that TH_EXPORT_DELTA_RULE exports, for ``run_delta_rule``."""
    return kernel(
        name,
        source,
        tensors="q k v g beta state cu_seqlens initial_indices state_indices out",
        integers="num_tokens num_seqs num_slots num_k_heads num_v_heads k_dim v_dim "
        "q_stride k_stride v_stride g_stride beta_stride "
        "qk_l2norm chunk_size is_bf16 num_threads",
        numbers="scale",
    )


def run_delta_rule(
    run: Callable[..., bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    scale: float,
    qk_l2norm: bool,
    chunk_size: int = 0,
) -> Tensor:
    """Run a kernel on the arguments of its op; without a chunk size, the recurrent one."""
    num_tokens, num_k_heads, k_dim = q.shape
    _, num_v_heads, v_dim = v.shape
    out = v.new_empty(v.shape)
    in_range = run(
        q,
        k,
        v,
        g,
        beta,
        state,
        cu_seqlens,
        initial_indices,
        state_indices,
        out,
        num_tokens,
        state_indices.shape[0],
        state.shape[0],
        num_k_heads,
        num_v_heads,
        k_dim,
        v_dim,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        g.stride(0),
        beta.stride(0),
        qk_l2norm,
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
