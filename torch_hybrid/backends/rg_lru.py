"""Real-gated linear recurrent units: their op, and how layers run it."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.backends.recurrent import CONVOLUTION, OpChoice, Recurrence, RecurrentPlan
from torch_hybrid.ops.rg_lru import op

_RULE = OpChoice(name="rg_lru", implementations=op.IMPLEMENTATIONS, sizes=lambda spec: {})
RG_LRU = Recurrence(decode=(_RULE, CONVOLUTION), extend=(_RULE, CONVOLUTION))


def apply_rg_lru(
    x: Tensor, gates: Tensor, log_a: Tensor, plan: RecurrentPlan, state: Tensor
) -> Tensor:
    """The recurrence over x [T, C] -> [T, C]; advances ``state``."""
    return op.rg_lru(
        x,
        gates,
        log_a,
        state,
        plan.cu_seqlens,
        plan.initial_indices,
        plan.state_indices,
        impl=plan.statics.impl("rg_lru"),
    )
