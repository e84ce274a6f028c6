"""The experts in torch: tokens sorted by expert, one pair of products per expert that is hit."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.formats.stored_weights import dequantized
from torch_hybrid.ops.fused_experts.op import FusedExperts
from torch_hybrid.ops.fused_experts.op_expert_linear import ExpertLinear
from torch_hybrid.ops.fused_experts.reference import activate


def fused_experts(x: FusedExperts) -> Tensor:
    """Compute the op by products of the tokens of each expert."""
    pairs = _pairs_by_expert(x.expert_ids, x.num_experts)
    tokens = x.x
    compute = torch.promote_types(tokens.dtype, torch.float32)
    results = tokens.new_zeros(x.num_pairs, x.dim, dtype=compute)
    for expert, hit in enumerate(pairs):
        if hit.shape[0] == 0:
            continue
        gate_up, down = _weights(x, expert)
        hidden = activate(x, F.linear(tokens[hit // x.top_k], gate_up))
        results[hit] = F.linear(hidden, down).to(compute)
    weighted = results * x.expert_weights.reshape(-1, 1).to(compute)
    return weighted.reshape(len(tokens), x.top_k, x.dim).sum(1).to(tokens.dtype)


def expert_linear(x: ExpertLinear) -> Tensor:
    """Compute one product, of the rows of each expert."""
    out = x.empty().zero_()
    for expert, hit in enumerate(_pairs_by_expert(x.expert_ids, len(x.weight))):
        if hit.shape[0]:
            weight = x.weight[expert]
            if x.scales is not None:
                weight = dequantized(weight, x.scales[expert], x.x.dtype)
            out[hit] = F.linear(x.x[hit], weight)
    return out


def _pairs_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    """Return the numbers of the pairs of each expert."""
    flat_ids = expert_ids.reshape(-1)
    order = flat_ids.argsort(stable=True)
    counts = torch.bincount(flat_ids, minlength=num_experts + 1)[:num_experts].tolist()
    pairs: tuple[Tensor, ...] = order[: sum(counts)].split(counts)
    return pairs


def _weights(x: FusedExperts, expert: int) -> tuple[Tensor, Tensor]:
    """Select an expert's two weights, dequantized to the tokens' dtype."""
    gate_up, down, dtype = x.gate_up[expert], x.down[expert], x.x.dtype
    if x.gate_up_scales is not None and x.down_scales is not None:
        gate_up = dequantized(gate_up, x.gate_up_scales[expert], dtype, num_parts=x.num_parts)
        down = dequantized(down, x.down_scales[expert], dtype)
    return gate_up, down
