"""What the op asks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.conv_step import check_width
from torch_hybrid.ops.core.recurrence import check_slots, check_tokens
from torch_hybrid.ops.core.registration import check_contiguous, check_dtypes, check_shapes


def check_options(*, dt_min: float, dt_max: float, norm_groups: int, width: int) -> None:
    """Raise ValueError for bounds that leave no step size, or groups that do not divide the
    ``width`` of what is normed."""
    if not 0 <= dt_min <= dt_max:
        raise ValueError(f"dt_min and dt_max must rise from 0, got {dt_min} and {dt_max}")
    if norm_groups < 1 or width % norm_groups:
        raise ValueError(f"norm_groups must divide the {width} channels of x, got {norm_groups}")


def check_inputs(
    xBC: Tensor,
    z: Tensor | None,
    dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    D: Tensor,
    norm_weight: Tensor | None,
    conv_state: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> None:
    """Raise ValueError naming the first argument that has a wrong shape, dtype or layout."""
    for name, tensor, dims in (
        ("xBC", xBC, 2),
        ("state", state, 4),
        ("conv_weight", conv_weight, 2),
    ):
        if tensor.ndim != dims:
            raise ValueError(f"{name} must have {dims} dimensions, got {list(tensor.shape)}")
    if z is None and norm_weight is not None:
        raise ValueError("norm_weight must be None where z is None: what is normed has a gate")
    num_tokens, channels = xBC.shape
    num_slots, num_heads, v_dim, k_dim = state.shape
    width = conv_weight.shape[1]
    check_width(conv_weight)
    _check_groups(channels, num_heads, v_dim, k_dim)
    dtype, inner = xBC.dtype, num_heads * v_dim
    check_tokens(
        {
            "xBC": (xBC, xBC.shape, dtype),
            "z": (z, (num_tokens, inner), dtype),
            "dt": (dt, (num_tokens, num_heads), dtype),
        }
    )
    parameters: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "conv_weight": (conv_weight, (channels, width)),
        "conv_bias": (conv_bias, (channels,)),
        "A_log": (A_log, (num_heads,)),
        "dt_bias": (dt_bias, (num_heads,)),
        "D": (D, (num_heads,)),
        "norm_weight": (norm_weight, (inner,)),
        "conv_state": (conv_state, (num_slots, width - 1, channels)),
    }
    check_shapes(parameters)
    wide = {"A_log": A_log, "dt_bias": dt_bias, "D": D, "norm_weight": norm_weight}
    dtypes = {n: x.dtype for n, x in wide.items() if x is not None and x.dtype == torch.float32}
    check_dtypes({name: (x, dtypes.get(name, dtype)) for name, (x, _) in parameters.items()})
    check_contiguous(**{name: tensor for name, (tensor, _) in parameters.items()})
    check_slots(state, state.shape[1:], cu_seqlens, initial_indices, state_indices)


def _check_groups(channels: int, num_heads: int, v_dim: int, k_dim: int) -> None:
    """B and C take what x leaves of the channels: whole groups, which divide the heads."""
    of_groups = channels - num_heads * v_dim
    num_groups = of_groups // (2 * k_dim)
    if num_groups < 1 or of_groups % (2 * k_dim) or num_heads % num_groups:
        raise ValueError(
            f"xBC must have {num_heads * v_dim} + 2 G {k_dim} channels, where G divides the "
            f"{num_heads} heads of state, got {channels}"
        )
