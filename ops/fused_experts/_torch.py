"""The experts in torch: tokens sorted by expert, one pair of products per expert that is hit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.formats.stored_weights import dequantized
from torch_hybrid.ops.fused_experts.bounds import check_ids


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
) -> Tensor:
    """See ``torch_hybrid.ops.fused_experts.op.fused_experts``."""
    num_experts, top_k = down.shape[0], expert_ids.shape[1]
    if expert_ids.device.type == "cpu":
        check_ids(expert_ids, num_experts)
    flat_ids = expert_ids.reshape(-1)
    order = flat_ids.argsort(stable=True)
    counts = torch.bincount(flat_ids, minlength=num_experts + 1)[:num_experts].tolist()
    pairs = order[: sum(counts)].split(counts)

    compute = torch.promote_types(x.dtype, torch.float32)
    results = x.new_zeros(flat_ids.shape[0], x.shape[1], dtype=compute)
    for expert, hit in enumerate(pairs):
        if hit.shape[0] == 0:
            continue
        w_up, w_down = gate_up[expert], down[expert]
        if gate_up_scales is not None and down_scales is not None:
            num_parts = 1 + (activation == "silu")
            w_up = dequantized(w_up, gate_up_scales[expert], x.dtype, num_parts=num_parts)
            w_down = dequantized(w_down, down_scales[expert], x.dtype)
        hidden = _activate(F.linear(x[hit // top_k], w_up), activation, limit, softcaps)
        results[hit] = F.linear(hidden, w_down).to(compute)
    weighted = results * expert_weights.reshape(-1, 1).to(compute)
    return weighted.reshape(x.shape[0], top_k, x.shape[1]).sum(1).to(x.dtype)


def _activate(
    projected: Tensor,
    activation: str,
    limit: float | None,
    softcaps: Sequence[float] | None,
) -> Tensor:
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
