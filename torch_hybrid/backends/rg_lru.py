"""Real-gated linear recurrent units: their op, and how layers run it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_hybrid.backends.recurrent import (
    CONVOLUTION,
    At,
    OpChoice,
    Recurrence,
    RecurrentPlan,
)
from torch_hybrid.backends.replay import walk
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.ops.rg_lru import op
from torch_hybrid.specs import STATE_RECORDS

_RULE = OpChoice(name="rg_lru", implementations=op.IMPLEMENTATIONS, sizes=lambda spec: {})
RG_LRU = Recurrence(decode=(_RULE, CONVOLUTION), extend=(_RULE, CONVOLUTION))


def apply_rg_lru(
    x: Tensor, gates: Tensor, log_a: Tensor, plan: RecurrentPlan, cache: LayerCache
) -> Tensor:
    """Apply the gated linear recurrence to x [T, C] -> [T, C]; advance the state in ``cache``."""

    def run(advancing: Sequence[Tensor], reading: Sequence[Tensor], at: At) -> Tensor:
        x, gates = advancing
        return op.rg_lru(
            x,
            gates,
            log_a,
            cache["state"],
            at.cu_seqlens,
            at.initial_indices,
            at.state_indices,
            impl=plan.statics.impl("rg_lru"),
        )

    return walk(run, [x, gates], [], plan, cache, STATE_RECORDS)
