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
        tensors="qkv gate q_norm_weight k_norm_weight norm_weight cos sin slopes state records "
        "cu_seqlens initial_indices state_indices accepted out",
        integers="num_tokens num_seqs num_slots num_v_heads v_dim k_dim num_records qkv_stride "
        "gate_stride cos_stride sin_stride half silu norm_groups is_bf16 wide_q_norm wide_k_norm "
        "wide_norm state_streams num_threads",
        numbers="scale norm_eps",
    )


_STEP, _VERIFY = _kernel("lightning_step"), _kernel("lightning_verify")


def lightning_step(*tensors: Tensor | None, **options: Any) -> Tensor:
    """Each thread takes a head of a sequence at a time."""
    return _run(_STEP, *tensors, **options)  # type: ignore[arg-type]


def lightning_verify(*tensors: Tensor | None, **options: Any) -> Tensor:
    """As the decode step; all tokens of a sequence go through a few rows of a state together."""
    return _run(_VERIFY, *tensors, **options)  # type: ignore[arg-type]


def _run(
    run: Callable[..., bool],
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
    records: Tensor | None = None,
    accepted: Tensor | None = None,
    *,
    activation: str,
    scale: float,
    norm_groups: int,
    norm_eps: float,
) -> Tensor:
    num_tokens, num_slots = qkv.shape[0], state.shape[0]
    _, num_heads, v_dim, k_dim = state.shape
    dtype = torch.float32 if gate is None else qkv.dtype
    out = qkv.new_empty(num_tokens, num_heads * v_dim, dtype=dtype)
    in_range = run(
        qkv,
        gate,
        q_norm_weight,
        k_norm_weight,
        norm_weight,
        cos,
        sin,
        slopes,
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
        num_heads,
        v_dim,
        k_dim,
        0 if records is None else records.shape[1],
        qkv.stride(0),
        0 if gate is None else gate.stride(0),
        0 if cos is None else cos.stride(0),
        0 if sin is None else sin.stride(0),
        0 if cos is None else cos.shape[1],
        activation == "silu",
        norm_groups,
        qkv.dtype is torch.bfloat16,
        q_norm_weight is not None and q_norm_weight.dtype is torch.float32,
        k_norm_weight is not None and k_norm_weight.dtype is torch.float32,
        norm_weight is not None and norm_weight.dtype is torch.float32,
        tuning(qkv.dtype).state_streams,
        torch.get_num_threads(),
        scale,
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
