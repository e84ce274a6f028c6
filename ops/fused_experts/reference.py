"""The experts as their definition: one token and one expert after the other, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.formats.block_scales import rounded
from torch_hybrid.ops.formats.stored_weights import dequantized


def fused_experts_reference(
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
    rounds: bool = False,
) -> Tensor:
    """The oracle of the op: same arguments, any float dtype; with ``rounds``, tokens and hidden
    activations in 8 bits too.

    It computes in float32, or in float64 when ``x`` is float64.
    """
    dtype, compute = x.dtype, torch.promote_types(x.dtype, torch.float32)
    x = rounded(x) if rounds else x
    if gate_up_scales is not None and down_scales is not None:
        num_parts = gate_up.shape[1] // down.shape[2]
        gate_up = dequantized(gate_up, gate_up_scales, compute, num_parts=num_parts)
        down = dequantized(down, down_scales, compute)
    out = torch.zeros_like(x, dtype=compute, memory_format=torch.contiguous_format)
    for t, chosen in enumerate(expert_ids.tolist()):
        for j, expert in enumerate(chosen):
            if expert == down.shape[0]:
                continue
            projected = gate_up[expert].to(compute) @ x[t].to(compute)
            hidden = _activate(projected, activation, limit, softcaps)
            if rounds:
                hidden = rounded(hidden.to(dtype)).to(compute)
            y = down[expert].to(compute) @ hidden
            out[t] += expert_weights[t, j].to(compute) * y
    return out.to(dtype)


def _activate(
    projected: Tensor,
    activation: str,
    limit: float | None,
    softcaps: Sequence[float] | None,
) -> Tensor:
    """[..., 2 I], gate and up, or [..., I] without a gate, to the hidden activations [..., I]."""
    if activation == "relu2":
        return F.relu(projected).square()
    gate, up = projected.chunk(2, dim=-1)
    if softcaps is not None:
        bound_gate, bound_up = (
            cap * torch.tanh(x / cap) for x, cap in zip((gate, up), softcaps, strict=True)
        )
        return bound_gate * torch.sigmoid(gate) * bound_up
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up
