"""Implementation "cpp": products of torch, and activations in C++."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.fused_experts.op import FusedExperts
from torch_hybrid.ops.fused_experts.training import _torch
from torch_hybrid.ops.native.call import kernel

_RUN = kernel(
    "experts_activation",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="projected expert_weights order dweighted weighted dprojected dweights",
    integers="num_rows width has_gate is_bf16 weights_are_float num_threads",
    numbers="limit gate_softcap up_softcap",
)


def _activated(x: FusedExperts, projected: Tensor, order: Tensor) -> Tensor:
    """Activate rows, by the router's weights."""
    weighted = projected.new_empty(len(order), x.width)
    _run(x, projected, order, None, weighted, None, None)
    return weighted


def _differentiated(
    x: FusedExperts, projected: Tensor, order: Tensor, dweighted: Tensor
) -> tuple[Tensor, ...]:
    """Activate rows, by the router's weights, and go back through that."""
    made = torch.empty_like(dweighted), torch.empty_like(projected)
    dweights = torch.empty_like(x.expert_weights)
    _run(x, projected, order, dweighted, *made, dweights)
    return *made, dweights


def _run(x: FusedExperts, projected: Tensor, order: Tensor, *others: Tensor | None) -> None:
    """Call the kernel."""
    gate_softcap, up_softcap = x.softcaps or (0.0, 0.0)
    _RUN(
        *(projected, x.expert_weights, order, *others),
        *(len(order), x.width, x.has_gate, x.x.dtype is torch.bfloat16),
        *(x.expert_weights.dtype is torch.float32, torch.get_num_threads()),
        *(math.inf if x.limit is None else x.limit, gate_softcap, up_softcap),
    )


fused_experts_forward = partial(_torch.fused_experts_forward, activated=_activated)
fused_experts_backward = partial(_torch.fused_experts_backward, differentiated=_differentiated)
