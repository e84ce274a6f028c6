"""The experts in C++: each hit expert's weights are read from memory once, for all its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torch_hybrid.ops.formats.stored_weights import (
    are_integers,
    format_of,
    group_of,
    has_zeros,
)
from torch_hybrid.ops.fused_experts.op import FusedExperts
from torch_hybrid.ops.fused_experts.op_expert_linear import ExpertLinear
from torch_hybrid.ops.linear._cpu import INTEGERS, SOURCE
from torch_hybrid.ops.native.call import kernel
from torch_hybrid.ops.native.cpu_tuning import tuning

# Tokens of one call: they bound the hidden activations; the next call reads weights anew.
MAX_TOKENS = 2048
_MAX_ROWS = 4 * MAX_TOKENS  # of one product, whose sums a thread has for 128 columns at least

_FIELDS = {
    "tensors": "x expert_ids expert_weights gate_up down gate_up_scales down_scales hidden out",
    "integers": "num_tokens top_k num_experts dim width ldx "
    "ids_are_int64 weights_are_float has_gate streams by_hardware is_bf16 is_invariant num_threads "
    "format gate_up_group down_group gate_up_has_zeros down_has_zeros",
    "numbers": "limit gate_softcap up_softcap",
}
_RUN = kernel("fused_experts", SOURCE, **_FIELDS)
_RUN_INTEGERS = kernel("experts_of_integers", INTEGERS, **_FIELDS)


def fused_experts(x: FusedExperts, *, is_invariant: bool = False) -> Tensor:
    """Compute the op in C++, MAX_TOKENS tokens at a time.

    With ``is_invariant``, experts of few tokens take the product of many, so that a token has the
    bits that it has alone.
    """
    out = x.x.new_empty(x.x.shape)
    hidden = x.x.new_empty(min(len(out), MAX_TOKENS) * x.top_k, x.width)
    weights = (x.gate_up, x.down, x.gate_up_scales, x.down_scales)
    run, sizes, forms = _plan(x, is_invariant=is_invariant)
    for first in range(0, len(out), MAX_TOKENS):
        block = slice(first, first + MAX_TOKENS)
        tokens = (x.x[block], x.expert_ids[block], x.expert_weights[block])
        count = min(MAX_TOKENS, len(out) - first)
        if not run(*tokens, *weights, hidden, out[block], count, *sizes, *forms, *_bounds(x)):
            x.check_indices()
    return out


def expert_linear(x: ExpertLinear, *, is_invariant: bool = False) -> Tensor:
    """Compute one product in C++, _MAX_ROWS rows at a time; ``is_invariant`` as above."""
    out, call = x.empty(), x.as_experts()
    run, sizes, forms = _plan(call, is_invariant=is_invariant)
    for first in range(0, len(out), _MAX_ROWS):
        block = slice(first, first + _MAX_ROWS)
        tokens = (x.x[block], x.expert_ids[block], None)
        weights = (None, x.weight, None, x.scales, None)
        rows = out[block]
        if not run(*tokens, *weights, rows, len(rows), *sizes, *forms, *_bounds(call)):
            x.check_indices()
    return out


def _plan(
    x: FusedExperts, *, is_invariant: bool
) -> tuple[Callable[..., bool], tuple[int, ...], tuple[int, ...]]:
    """Choose the kernel, its sizes from ``top_k`` to ``ldx``, and what follows them."""
    run = _RUN_INTEGERS if are_integers(x.down.dtype) else _RUN
    sizes = (x.top_k, x.num_experts, x.dim, x.width, x.x.stride(0))
    return run, sizes, (*_forms(x, is_invariant=is_invariant), *_stored(x))


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
