"""What the op asks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.recurrence import check_slots, check_tokens
from torch_hybrid.ops.core.registration import check_contiguous, check_dtypes, check_shapes


def check_inputs(
    qkv: Tensor,
    gate: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    slopes: Tensor,
    norm_weight: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    norm_groups: int,
) -> None:
    """Raise ValueError naming the first argument that has a wrong shape, dtype or layout."""
    for name, tensor, dims in (("qkv", qkv, 2), ("state", state, 4)):
        if tensor.ndim != dims:
            raise ValueError(f"{name} must have {dims} dimensions, got {list(tensor.shape)}")
    for one, other, are_there in (
        ("q_norm_weight", "k_norm_weight", (q_norm_weight is None, k_norm_weight is None)),
        ("cos", "sin", (cos is None, sin is None)),
        ("gate", "norm_weight", (gate is None, norm_weight is None)),
    ):
        if len(set(are_there)) > 1:
            raise ValueError(f"{one} and {other} must both be given, or both be None")
    (num_tokens, _), (_, num_heads, dim, _) = qkv.shape, state.shape
    width = num_heads * dim
    if norm_groups < 1 or width % norm_groups:
        raise ValueError(f"norm_groups must divide the {width} channels of o, got {norm_groups}")
    half = 0 if cos is None else cos.shape[-1]
    if 2 * half > dim:
        raise ValueError(f"cos must have at most {dim // 2} columns, got {half}")
    check_tokens(
        {
            "qkv": (qkv, (num_tokens, 3 * width), qkv.dtype),
            "gate": (gate, (num_tokens, width), qkv.dtype),
            "cos": (cos, (num_tokens, half), torch.float32),
            "sin": (sin, (num_tokens, half), torch.float32),
        }
    )
    weights = {
        "q_norm_weight": (q_norm_weight, (dim,)),
        "k_norm_weight": (k_norm_weight, (dim,)),
        "norm_weight": (norm_weight, (width,)),
    }
    parameters = weights | {"slopes": (slopes, (num_heads,))}
    check_shapes(parameters)
    wide = {name for name, (x, _) in weights.items() if x is not None and x.dtype == torch.float32}
    check_dtypes(
        {
            name: (x, torch.float32 if name in wide or name == "slopes" else qkv.dtype)
            for name, (x, _) in parameters.items()
        }
    )
    check_contiguous(**{name: x for name, (x, _) in parameters.items()})
    check_slots(state, (num_heads, dim, dim), cu_seqlens, initial_indices, state_indices)
