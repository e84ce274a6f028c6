"""The experts in C++: each hit expert's weights are read from memory once, for all its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.formats.stored_weights import (
    are_integers,
    depth_of,
    format_of,
    group_of,
    has_zeros,
)
from torch_hybrid.ops.fused_experts.bounds import check_ids
from torch_hybrid.ops.native.call import kernel
from torch_hybrid.ops.native.cpu_tuning import tuning

# Of tokens in one go: it bounds the hidden activations, and their experts' weights are read anew.
MAX_TOKENS = 2048

_FIELDS = {
    "tensors": "x expert_ids expert_weights gate_up down gate_up_scales down_scales hidden out",
    "integers": "num_tokens top_k num_experts dim width ldx "
    "ids_are_int64 weights_are_float has_gate streams by_hardware is_bf16 is_invariant num_threads "
    "format gate_up_group down_group gate_up_has_zeros down_has_zeros",
    "numbers": "limit gate_softcap up_softcap",
}
_RUN = kernel("fused_experts", Path(__file__).with_name("_cpu.cpp"), **_FIELDS)
_RUN_INTEGERS = kernel(
    "experts_of_integers", Path(__file__).with_name("_cpu_integers.cpp"), **_FIELDS
)


def fused_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_scales: Tensor | None = None,
    down_scales: Tensor | None = None,
    activation: str,
    limit: float | None = None,
    softcaps: Sequence[float] | None = None,
    is_invariant: bool = False,
) -> Tensor:
    """See ``torch_hybrid.ops.fused_experts.op.fused_experts``."""
    out = x.new_empty(x.shape)
    num_tokens, top_k = expert_ids.shape
    measured = tuning(x.dtype)
    num_experts, dim, width = *down.shape[:2], depth_of(down)
    groups, zeros = [0, 0], [False, False]
    if gate_up_scales is not None and down_scales is not None:
        pairs = ((gate_up, gate_up_scales), (down, down_scales))
        groups, zeros = [group_of(*pair) for pair in pairs], [has_zeros(*pair) for pair in pairs]
    hidden = x.new_empty(min(num_tokens, MAX_TOKENS) * top_k, width)
    run = _RUN_INTEGERS if are_integers(down.dtype) else _RUN
    for first in range(0, num_tokens, MAX_TOKENS):
        block = slice(first, first + MAX_TOKENS)
        in_range = run(
            x[block],
            expert_ids[block],
            expert_weights[block],
            gate_up,
            down,
            gate_up_scales,
            down_scales,
            hidden,
            out[block],
            min(MAX_TOKENS, num_tokens - first),
            top_k,
            num_experts,
            dim,
            width,
            x.stride(0),
            expert_ids.dtype is torch.int64,
            expert_weights.dtype is torch.float32,
            activation == "silu",
            measured.streams,
            measured.by_hardware,
            x.dtype is torch.bfloat16,
            is_invariant,
            torch.get_num_threads(),
            format_of(down.dtype),
            *groups,
            *zeros,
            math.inf if limit is None else limit,
            *(softcaps or (0.0, 0.0)),
        )
        if not in_range:
            check_ids(expert_ids, num_experts)
    return out
