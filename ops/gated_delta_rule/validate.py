"""What the ops of this family ask of their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.registration import check_shapes


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
) -> None:
    """Raise ValueError naming the first argument that has a wrong shape, dtype or layout."""
    for name, tensor in {"q": q, "v": v}.items():
        if tensor.ndim != 3:
            raise ValueError(f"{name} must have 3 dimensions, got {list(tensor.shape)}")
    num_tokens, num_k_heads, k_dim = q.shape
    num_v_heads, v_dim = v.shape[1:]
    num_seqs = state_indices.shape[0]
    check_shapes(
        {
            "k": (k, q.shape),
            "v": (v, (num_tokens, num_v_heads, v_dim)),
            "g": (g, (num_tokens, num_v_heads)),
            "beta": (beta, (num_tokens, num_v_heads)),
            "state": (state, (state.shape[0], num_v_heads, v_dim, k_dim)),
            "cu_seqlens": (cu_seqlens, (num_seqs + 1,)),
            "state_indices": (state_indices, (num_seqs,)),
            "has_initial_state": (has_initial_state, (num_seqs,)),
        }
    )
    if num_v_heads % num_k_heads:
        raise ValueError(
            f"v must have a multiple of the {num_k_heads} heads of k, got {num_v_heads}"
        )
    _check_dtypes(
        {
            "k": (k, q.dtype),
            "v": (v, q.dtype),
            "g": (g, torch.float32),
            "beta": (beta, torch.float32),
            "state": (state, torch.float32),
            "cu_seqlens": (cu_seqlens, torch.int32),
            "state_indices": (state_indices, torch.int32),
            "has_initial_state": (has_initial_state, torch.bool),
        }
    )
    for name, tensor in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items():
        _check_contiguous_rows(name, tensor)
    if not state.is_contiguous():
        raise ValueError(f"state must be contiguous, got strides {list(state.stride())}")


def _check_dtypes(expected: dict[str, tuple[Tensor, torch.dtype]]) -> None:
    for name, (tensor, dtype) in expected.items():
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must have dtype {dtype}, got {tensor.dtype}")


def _check_contiguous_rows(name: str, tensor: Tensor) -> None:
    """Rows may lie any distance apart (a slice of a wider tensor); one row must be dense."""
    dense = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()), strict=False):
        if size > 1 and stride != dense:
            strides = list(tensor.stride())
            raise ValueError(f"{name} must have contiguous rows, got strides {strides}")
        dense *= size
