"""The experts as their definition: one token and one expert after the other, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.formats.block_scales import rounded
from torch_hybrid.ops.formats.stored_weights import dequantized
from torch_hybrid.ops.fused_experts.op import FusedExperts


def fused_experts_reference(x: FusedExperts) -> Tensor:
    """Compute the op for tokens of any float dtype, in float32 or better."""
    return sum_experts(x, rounds=False)


def sum_experts(x: FusedExperts, *, rounds: bool) -> Tensor:
    """Compute the op in float32, or in float64 when tokens are float64.

    With ``rounds``, tokens and hidden activations are rounded to FP8, as "triton_fp8" does it.
    """
    dtype, compute = x.x.dtype, torch.promote_types(x.x.dtype, torch.float32)
    tokens, gate_up, down = rounded(x.x) if rounds else x.x, x.gate_up, x.down
    if x.gate_up_scales is not None and x.down_scales is not None:
        gate_up = dequantized(gate_up, x.gate_up_scales, compute, num_parts=x.num_parts)
        down = dequantized(down, x.down_scales, compute)
    out = torch.zeros_like(x.x, dtype=compute, memory_format=torch.contiguous_format)
    for t, chosen in enumerate(x.expert_ids.tolist()):
        for j, expert in enumerate(chosen):
            if expert == x.num_experts:
                continue
            projected = gate_up[expert].to(compute) @ tokens[t].to(compute)
            hidden = activate(x, projected)
            if rounds:
                hidden = rounded(hidden.to(dtype)).to(compute)
            y = down[expert].to(compute) @ hidden
            out[t] += x.expert_weights[t, j].to(compute) * y
    return out.to(dtype)


class Activation(Protocol):
    """Bounds of an activation, as ``fused_experts`` takes them."""

    @property
    def has_gate(self) -> bool: ...
    @property
    def limit(self) -> float | None: ...
    @property
    def softcaps(self) -> Sequence[float] | None: ...


def activate(x: Activation, projected: Tensor) -> Tensor:
    """Turn [..., 2 I], gate and up, or [..., I] without a gate, into hidden activations."""
    if not x.has_gate:
        return F.relu(projected).square()
    gate, up = projected.chunk(2, dim=-1)
    if x.softcaps is not None:
        bound_gate, bound_up = (
            cap * torch.tanh(part / cap) for part, cap in zip((gate, up), x.softcaps, strict=True)
        )
        return bound_gate * torch.sigmoid(gate) * bound_up
    if x.limit is not None:
        gate, up = gate.clamp(max=x.limit), up.clamp(-x.limit, x.limit)
    return F.silu(gate) * up
