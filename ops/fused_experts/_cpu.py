"""The experts in C++: each hit expert's weights are read from memory once, for all its tokens."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.formats.stored_weights import (
    are_integers,
    format_of,
    group_of,
    has_zeros,
)
from torch_hybrid.ops.fused_experts.op import FusedExperts
from torch_hybrid.ops.native.call import kernel
from torch_hybrid.ops.native.cpu_tuning import tuning

# Tokens of one call: they bound the hidden activations; the next call reads weights anew.
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


def fused_experts(x: FusedExperts, *, is_invariant: bool = False) -> Tensor:
    """Compute the op in C++, MAX_TOKENS tokens at a time.

    With ``is_invariant``, experts of few tokens take the product of many, so that a token has the
    bits that it has alone.
    """
    out = x.x.new_empty(x.x.shape)
    hidden = x.x.new_empty(min(len(out), MAX_TOKENS) * x.top_k, x.width)
    weights = (x.gate_up, x.down, x.gate_up_scales, x.down_scales)
    sizes = (x.top_k, x.num_experts, x.dim, x.width, x.x.stride(0))
    forms = (*_forms(x, is_invariant=is_invariant), *_stored(x))
    run = _RUN_INTEGERS if are_integers(x.down.dtype) else _RUN
    for first in range(0, len(out), MAX_TOKENS):
        block = slice(first, first + MAX_TOKENS)
        tokens = (x.x[block], x.expert_ids[block], x.expert_weights[block])
        count = min(MAX_TOKENS, len(out) - first)
        if not run(*tokens, *weights, hidden, out[block], count, *sizes, *forms, *_bounds(x)):
            x.check_indices()
    return out


def _forms(x: FusedExperts, *, is_invariant: bool) -> tuple[int, ...]:
    """List how the kernel reads tokens and weights, from ``ids_are_int64`` to ``num_threads``."""
    measured = tuning(x.x.dtype)
    return (
        x.expert_ids.dtype is torch.int64,
        x.expert_weights.dtype is torch.float32,
        x.has_gate,
        measured.streams,
        measured.by_hardware,
        x.x.dtype is torch.bfloat16,
        is_invariant,
        torch.get_num_threads(),
    )


def _stored(x: FusedExperts) -> tuple[int, ...]:
    """List the format of weights, and groups and zero points of both."""
    if x.gate_up_scales is None or x.down_scales is None:
        return (format_of(x.down.dtype), 0, 0, False, False)
    pairs = ((x.gate_up, x.gate_up_scales), (x.down, x.down_scales))
    groups = (group_of(*pair) for pair in pairs)
    return (format_of(x.down.dtype), *groups, *(has_zeros(*pair) for pair in pairs))


def _bounds(x: FusedExperts) -> tuple[float, ...]:
    """List the limit, infinite where there is none, and softcaps, 0 where there are none."""
    return (math.inf if x.limit is None else x.limit, *(x.softcaps or (0.0, 0.0)))
