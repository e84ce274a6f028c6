"""One product of experts as its definition, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.formats.stored_weights import dequantized
from torch_hybrid.ops.fused_experts.op_expert_linear import ExpertLinear


def expert_linear(x: ExpertLinear) -> Tensor:
    """Compute the op row by row, in float32 or wider."""
    work = torch.promote_types(x.x.dtype, torch.float32)
    weight = x.weight if x.scales is None else dequantized(x.weight, x.scales, work)
    out = x.x.new_zeros(x.x.shape[0], weight.shape[1])
    for t, expert in enumerate(x.expert_ids.tolist()):
        if expert < len(weight):
            out[t] = weight[expert].to(work) @ x.x[t].to(work)
    return out
