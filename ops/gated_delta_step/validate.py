"""What the op asks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.recurrence import check_slots, check_tokens
from torch_hybrid.ops.registration import check_contiguous, check_dtypes, check_shapes

ACTIVATIONS = ("none", "silu")
MIN_WIDTH, MAX_WIDTH = 2, 8


def check_options(activation: str) -> None:
    """Raise ValueError for an activation that there is not."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {list(ACTIVATIONS)}, got {activation!r}")


def check_inputs(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> None:
    """Raise ValueError naming the first argument that has a wrong shape, dtype or layout."""
    for name, tensor, dims in (
        ("qkv", qkv, 2),
        ("state", state, 4),
        ("conv_weight", conv_weight, 2),
    ):
        if tensor.ndim != dims:
            raise ValueError(f"{name} must have {dims} dimensions, got {list(tensor.shape)}")
    num_tokens, channels = qkv.shape
    num_slots, num_v_heads, v_dim, k_dim = state.shape
    width = conv_weight.shape[1]
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise ValueError(f"conv_weight must have width {MIN_WIDTH} to {MAX_WIDTH}, got {width}")
    _check_heads(channels, num_v_heads, v_dim, k_dim)
    dtype = qkv.dtype
    per_head = (num_tokens, num_v_heads)
    check_tokens(
        {
            "qkv": (qkv, qkv.shape, dtype),
            "z": (z, (num_tokens, num_v_heads * v_dim), dtype),
            "b": (b, per_head, dtype),
            "a": (a, per_head, dtype),
        }
    )
    parameters: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "conv_weight": (conv_weight, (channels, width)),
        "conv_bias": (conv_bias, (channels,)),
        "A_log": (A_log, (num_v_heads,)),
        "dt_bias": (dt_bias, (num_v_heads,)),
        "norm_weight": (norm_weight, (v_dim,)),
        "conv_state": (conv_state, (num_slots, width - 1, channels)),
    }
    check_shapes(parameters)
    wide = {"A_log": A_log, "dt_bias": dt_bias, "norm_weight": norm_weight}
    dtypes = {name: x.dtype for name, x in wide.items() if x.dtype == torch.float32}
    check_dtypes({name: (x, dtypes.get(name, dtype)) for name, (x, _) in parameters.items()})
    check_contiguous(**{name: tensor for name, (tensor, _) in parameters.items()})
    check_slots(state, state.shape[1:], cu_seqlens, initial_indices, state_indices)


def _check_heads(channels: int, num_v_heads: int, v_dim: int, k_dim: int) -> None:
    """q and k take what v leaves of the channels: whole heads, which divide those of v."""
    of_keys = channels - num_v_heads * v_dim
    num_k_heads = of_keys // (2 * k_dim)
    if num_k_heads < 1 or of_keys % (2 * k_dim) or num_v_heads % num_k_heads:
        raise ValueError(
            f"qkv must have 2 H {k_dim} + {num_v_heads * v_dim} channels, where H divides the "
            f"{num_v_heads} heads of state, got {channels}"
        )


def check_lengths(cu_seqlens: Tensor) -> None:
    """Raise ValueError for offsets on the host of a sequence of several tokens."""
    lengths = cu_seqlens.diff().tolist()
    if any(length > 1 for length in lengths):
        raise ValueError(f"each sequence must have one token or none, got lengths {lengths}")
