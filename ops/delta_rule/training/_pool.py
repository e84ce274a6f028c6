"""Forwards without pools, by the kernels of the chunk form on a pool of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.core.capability import Implementation
from torch_hybrid.ops.delta_rule.op import ChunkGatedDeltaRule, ChunkKimiDeltaAttention
from torch_hybrid.ops.delta_rule.training.op import (
    GatedDeltaRuleForward,
    KimiDeltaAttentionForward,
)

Results = tuple[Tensor, Tensor]


def gated_delta_rule_forward(x: GatedDeltaRuleForward, *, by: Implementation) -> Results:
    """Run an implementation of ``chunk_gated_delta_rule``."""
    return _run(x, ChunkGatedDeltaRule, by)


def kimi_delta_attention_forward(x: KimiDeltaAttentionForward, *, by: Implementation) -> Results:
    """Run an implementation of ``chunk_kimi_delta_attention``."""
    return _run(x, ChunkKimiDeltaAttention, by)


@without_autocast
def _run(
    x: GatedDeltaRuleForward | KimiDeltaAttentionForward, chunk_form: Any, by: Implementation
) -> Results:
    """Put sequence n into slot n + 1; a state that nobody asks for has no slot."""
    slots = torch.arange(1, x.num_seqs + 1, dtype=torch.int32, device=x.v.device)
    is_kept = x.output_final_state or x.initial_state is not None
    pool = _pool(x, num_slots=x.num_seqs + 1 if is_kept else 1)
    null = torch.zeros_like(slots)
    out = by.load()(
        chunk_form(
            *(x.q, x.k, x.v, x.g, x.beta, pool, x.cu_seqlens),
            null if x.initial_state is None else slots,
            slots if is_kept else null,
            scale=x.scale,
            qk_l2norm=x.qk_l2norm,
            impl=x.impl,
        )
    )
    return out, pool[1:].clone() if x.output_final_state else pool.new_empty(0, *pool.shape[1:])


def _pool(x: GatedDeltaRuleForward | KimiDeltaAttentionForward, num_slots: int) -> Tensor:
    _, num_heads, v_dim = x.v.shape
    shape = (num_slots, num_heads, v_dim, x.k.shape[2])
    if x.initial_state is None:
        return x.v.new_zeros(shape, dtype=x.work)
    pool = x.v.new_empty(shape, dtype=x.work)
    pool[0].zero_()
    pool[1:].copy_(x.initial_state)
    return pool
