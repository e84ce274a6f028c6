"""The decode step as a C++ kernel: see _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.gated_delta_step.validate import check_lengths
from torch_hybrid.ops.native.call import kernel
from torch_hybrid.ops.state_bounds import check_state_indices

_RUN = kernel(
    "gated_delta_step",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="qkv z b a conv_weight conv_bias A_log dt_bias norm_weight conv_state state "
    "cu_seqlens initial_indices state_indices out",
    integers="num_tokens num_seqs num_slots channels width num_v_heads v_dim k_dim "
    "qkv_stride z_stride b_stride a_stride silu is_bf16 wide_A_log wide_dt_bias wide_norm "
    "num_threads",
    numbers="scale beta_scale norm_eps",
)


def gated_delta_step(
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
    *,
    activation: str,
    scale: float,
    beta_scale: float,
    norm_eps: float,
) -> Tensor:
    """Each thread takes the heads of one key head of one sequence at a time."""
    num_tokens, channels = qkv.shape
    num_slots, num_v_heads, v_dim, k_dim = state.shape
    out = z.new_empty(z.shape)
    in_range = _RUN(
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
        cu_seqlens,
        initial_indices,
        state_indices,
        out,
        num_tokens,
        state_indices.shape[0],
        num_slots,
        channels,
        conv_weight.shape[1],
        num_v_heads,
        v_dim,
        k_dim,
        qkv.stride(0),
        z.stride(0),
        b.stride(0),
        a.stride(0),
        activation == "silu",
        qkv.dtype is torch.bfloat16,
        A_log.dtype is torch.float32,
        dt_bias.dtype is torch.float32,
        norm_weight.dtype is torch.float32,
        torch.get_num_threads(),
        scale,
        beta_scale,
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
        check_lengths(cu_seqlens)
    return out
