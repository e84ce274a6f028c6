"""Calls the C++ library of a delta rule's decode step (delta_step.h) and of steps that verify
drafts (delta_verify.h): the same for every mixer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.conv_step import check_have_slots
from torch_hybrid.ops.core.state_bounds import check_state_indices
from torch_hybrid.ops.native.call import kernel
from torch_hybrid.ops.native.cpu_tuning import tuning
from torch_hybrid.ops.verify import check_counts


def delta_step_kernel(name: str, source: Path) -> Callable[..., bool]:
    """A function that TH_EXPORT_DELTA_STEP or TH_EXPORT_DELTA_VERIFY exports."""
    return kernel(
        name,
        source,
        tensors="qkv z b a conv_weight conv_bias A_log dt_bias norm_weight conv_state state "
        "records cu_seqlens initial_indices state_indices accepted out",
        integers="num_tokens num_seqs num_slots channels width num_v_heads v_dim k_dim "
        "num_records record_width "
        "qkv_stride z_stride b_stride a_stride silu is_bf16 wide_A_log wide_dt_bias wide_norm "
        "is_bounded sigmoid_gate state_streams num_threads",
        numbers="scale beta_scale gate_lower_bound norm_eps",
    )


def run_delta_step(
    run: Callable[..., bool],
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
    records: Tensor | None = None,
    accepted: Tensor | None = None,
    *,
    activation: str,
    scale: float,
    norm_eps: float,
    beta_scale: float = 1.0,
    gate_lower_bound: float | None = None,
    gate: str = "silu",
) -> Tensor:
    """Run a kernel on the arguments of its op, and the options that it reads.

    ``records`` and ``accepted`` are those of a step that verifies drafts.
    """
    num_tokens, channels = qkv.shape
    num_slots, num_v_heads, v_dim, k_dim = state.shape
    out = z.new_empty(z.shape)
    in_range = run(
        qkv,
        z,
        b,
        a,
        conv_weight,
        conv_bias,
        A_log,
        dt_bias,
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
        num_v_heads,
        v_dim,
        k_dim,
        0 if records is None else records.shape[1],
        0 if records is None else records.shape[2],
        qkv.stride(0),
        z.stride(0),
        b.stride(0),
        a.stride(0),
        activation == "silu",
        qkv.dtype is torch.bfloat16,
        A_log.dtype is torch.float32,
        dt_bias.dtype is torch.float32,
        norm_weight.dtype is torch.float32,
        gate_lower_bound is not None,
        gate == "sigmoid",
        tuning(qkv.dtype).state_streams,
        torch.get_num_threads(),
        scale,
        beta_scale,
        gate_lower_bound or 0.0,
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
