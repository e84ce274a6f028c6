"""What the ops of this family ask of their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.recurrence import check_heads, check_slots, check_tokens


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> None:
    """Raise ValueError naming the first argument that has a wrong shape, dtype or layout."""
    check_heads(q=q, v=v)
    num_tokens, num_k_heads, k_dim = q.shape
    num_v_heads, v_dim = v.shape[1:]
    check_tokens(
        {
            "q": (q, q.shape, q.dtype),
            "k": (k, q.shape, q.dtype),
            "v": (v, (num_tokens, num_v_heads, v_dim), q.dtype),
            "g": (g, (num_tokens, num_v_heads), torch.float32),
            "beta": (beta, (num_tokens, num_v_heads), torch.float32),
        }
    )
    check_slots(state, (num_v_heads, v_dim, k_dim), cu_seqlens, initial_indices, state_indices)
    if num_v_heads % num_k_heads:
        raise ValueError(
            f"v must have a multiple of the {num_k_heads} heads of k, got {num_v_heads}"
        )
