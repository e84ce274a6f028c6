"""Both steps as C++ kernels: see _cpu.cpp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_hybrid.ops.conv_step import check_have_slots
from torch_hybrid.ops.core.state_bounds import check_state_indices
from torch_hybrid.ops.native.call import kernel
from torch_hybrid.ops.native.cpu_tuning import tuning
from torch_hybrid.ops.verify import check_counts


def _kernel(name: str) -> Callable[..., bool]:
    return kernel(
        name,
        Path(__file__).with_name("_cpu.cpp"),
        tensors="xBC z dt conv_weight conv_bias A_log dt_bias D norm_weight conv_state state "
        "records cu_seqlens initial_indices state_indices accepted out",
        integers="num_tokens num_seqs num_slots channels width num_v_heads v_dim k_dim "
        "num_records record_width xBC_stride z_stride dt_stride silu norm_before_gate norm_groups "
        "is_bf16 wide_A_log wide_dt_bias wide_D wide_norm state_streams num_threads",
        numbers="dt_min dt_max norm_eps",
    )


_STEP, _VERIFY = _kernel("ssd_step"), _kernel("ssd_verify")


def ssd_step(*tensors: Tensor | None, **options: Any) -> Tensor:
    """Each thread takes whole sequences or, where they are few, a share of each part of all."""
    return _run(_STEP, *tensors, **options)  # type: ignore[arg-type]


def ssd_verify(*tensors: Tensor | None, **options: Any) -> Tensor:
    """Each thread takes a share of each part of all; all tokens of a sequence go through a few rows
    of a state together."""
    return _run(_VERIFY, *tensors, **options)  # type: ignore[arg-type]


def _run(
    run: Callable[..., bool],
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
    records: Tensor | None = None,
    accepted: Tensor | None = None,
    *,
    activation: str,
    dt_min: float,
    dt_max: float,
    norm_before_gate: bool,
    norm_groups: int,
    norm_eps: float,
) -> Tensor:
    num_tokens, channels = xBC.shape
    num_slots, num_heads, v_dim, k_dim = state.shape
    out = xBC.new_empty(num_tokens, num_heads * v_dim)
    in_range = run(
        xBC,
        z,
        dt,
        conv_weight,
        conv_bias,
        A_log,
        dt_bias,
        D,
        norm_weight,
        conv_state,
        state,
        records,
        cu_seqlens,
        initial_indices,
        state_indices,
        accepted,
        out,
        num_tokens,
        state_indices.shape[0],
        num_slots,
        channels,
        conv_weight.shape[1],
        num_heads,
        v_dim,
        k_dim,
        0 if records is None else records.shape[1],
        0 if records is None else records.shape[2],
        xBC.stride(0),
        0 if z is None else z.stride(0),
        dt.stride(0),
        activation == "silu",
        norm_before_gate,
        norm_groups,
        xBC.dtype is torch.bfloat16,
        A_log.dtype is torch.float32,
        dt_bias.dtype is torch.float32,
        D.dtype is torch.float32,
        norm_weight is not None and norm_weight.dtype is torch.float32,
        tuning(xBC.dtype).state_streams,
        torch.get_num_threads(),
        dt_min,
        dt_max,
        norm_eps,
    )
    if not in_range:
        check_state_indices(
            cu_seqlens,
            initial_indices,
            state_indices,
            num_tokens=num_tokens,
            num_slots=num_slots,
        )
        if records is None or accepted is None:
            check_have_slots(cu_seqlens, state_indices)
        else:
            check_counts(records, cu_seqlens, initial_indices, accepted)
    return out
