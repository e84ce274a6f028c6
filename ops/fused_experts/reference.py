"""The experts as their definition: one token and one expert after the other, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def fused_experts_reference(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: str,
) -> Tensor:
    """The oracle of the op: same arguments, any float dtype.

    It computes in float32, or in float64 when ``x`` is float64.
    """
    compute = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros_like(x, dtype=compute, memory_format=torch.contiguous_format)
    for t, chosen in enumerate(expert_ids.tolist()):
        for j, expert in enumerate(chosen):
            if expert == down.shape[0]:
                continue
            hidden = _activate(gate_up[expert].to(compute) @ x[t].to(compute), activation)
            y = down[expert].to(compute) @ hidden
            out[t] += expert_weights[t, j].to(compute) * y
    return out.to(x.dtype)


def _activate(projected: Tensor, activation: str) -> Tensor:
    """[..., 2 I], gate and up, or [..., I] without a gate, to the hidden activations [..., I]."""
    if activation == "relu2":
        return F.relu(projected).square()
    gate, up = projected.chunk(2, dim=-1)
    return F.silu(gate) * up
