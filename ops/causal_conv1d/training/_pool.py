"""Forward without a pool, by the kernels of ``causal_conv1d`` on a pool of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.causal_conv1d.op import CausalConv1d
from torch_hybrid.ops.causal_conv1d.training.op import CausalConv1dForward
from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.core.capability import Implementation


@without_autocast
def causal_conv1d_forward(x: CausalConv1dForward, *, by: Implementation) -> tuple[Tensor, Tensor]:
    """Put sequence n into slot n + 1; a state that nobody asks for has no slot."""
    slots = torch.arange(1, x.num_seqs + 1, dtype=torch.int32, device=x.x.device)
    is_kept = x.output_final_state or x.initial_state is not None
    pool, null = x.states(x.num_seqs + 1 if is_kept else 1).zero_(), torch.zeros_like(slots)
    if x.initial_state is not None:
        pool[1:].copy_(x.initial_state)
    out = by.load()(
        CausalConv1d(
            *(x.x, x.weight, x.bias, pool, x.cu_seqlens),
            null if x.initial_state is None else slots,
            slots if is_kept else null,
            activation=x.activation,
            impl=x.impl,
        )
    )
    return out, pool[1:].clone() if x.output_final_state else x.states(0)
