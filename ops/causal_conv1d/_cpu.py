"""The convolution as a C++ kernel: see _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.core.state_bounds import check_state_indices
from torch_hybrid.ops.native.call import kernel

_RUN = kernel(
    "causal_conv1d",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="x input_gate output_gate token_taps weight bias conv_state cu_seqlens initial_indices "
    "state_indices out",
    integers="num_tokens num_seqs num_slots channels width x_stride input_gate_stride "
    "output_gate_stride num_heads silu is_bf16 num_threads",
)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    activation: str,
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
    token_taps: Tensor | None = None,
) -> Tensor:
    """Convolve blocks of tokens and channels in parallel, then write the states."""
    num_tokens, channels = x.shape
    out = x.new_empty(x.shape)
    in_range = _RUN(
        x,
        input_gate,
        output_gate,
        token_taps,
        weight,
        bias,
        conv_state,
        cu_seqlens,
        initial_indices,
        state_indices,
        out,
        num_tokens,
        state_indices.shape[0],
        conv_state.shape[0],
        channels,
        weight.shape[1],
        x.stride(0),
        0 if input_gate is None else input_gate.stride(0),
        0 if output_gate is None else output_gate.stride(0),
        1 if token_taps is None else token_taps.shape[1],
        activation == "silu",
        x.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    if not in_range:
        check_state_indices(
            cu_seqlens,
            initial_indices,
            state_indices,
            num_tokens=num_tokens,
            num_slots=conv_state.shape[0],
        )
    return out
