"""Forwards without pools, by the kernels of the chunk form on a pool of their own."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.core.capability import Implementation
from torch_hybrid.ops.core.packed import run_on_pool
from torch_hybrid.ops.core.recurrence import CHUNK
from torch_hybrid.ops.delta_rule.op import DeltaRule, GatedDeltaRule, KimiDeltaAttention
from torch_hybrid.ops.delta_rule.training.op import (
    GatedDeltaRuleForward,
    KimiDeltaAttentionForward,
)

Results = tuple[Tensor, Tensor]


def gated_delta_rule_forward(x: GatedDeltaRuleForward, *, by: Implementation) -> Results:
    """Run an implementation of ``gated_delta_rule``."""
    return _run(x, GatedDeltaRule, by)


def kimi_delta_attention_forward(x: KimiDeltaAttentionForward, *, by: Implementation) -> Results:
    """Run an implementation of ``kimi_delta_attention``."""
    return _run(x, KimiDeltaAttention, by)


def _run(
    x: GatedDeltaRuleForward | KimiDeltaAttentionForward, rule: type[DeltaRule], by: Implementation
) -> Results:
    def run(pool: Tensor, initial: Tensor, final: Tensor) -> Tensor:
        given = (x.q, x.k, x.v, x.g, x.beta, pool, x.cu_seqlens, initial, final)
        impl = f"{CHUNK}_{x.impl}"
        out: Tensor = by.load()(rule(*given, scale=x.scale, qk_l2norm=x.qk_l2norm, impl=impl))
        return out

    return run_on_pool(x, run)
