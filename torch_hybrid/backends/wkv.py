"""RWKV's weighted average of past values: its op, and how layers run it."""

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
from torch_hybrid.ops.wkv import op
from torch_hybrid.specs import STATE_RECORDS

_RULE = OpChoice(name="wkv", implementations=op.IMPLEMENTATIONS, sizes=lambda spec: {})
TIME_MIX = Recurrence(decode=(_RULE, CONVOLUTION), extend=(_RULE, CONVOLUTION))


def apply_wkv(
    k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, plan: RecurrentPlan, cache: LayerCache
) -> Tensor:
    """Average past values v [T, C] by keys k and age -> [T, C]; advance the state in ``cache``."""

    def run(advancing: Sequence[Tensor], reading: Sequence[Tensor], at: At) -> Tensor:
        k, v = advancing
        return op.wkv(
            k,
            v,
            log_decay,
            bonus,
            cache["state"],
            at.cu_seqlens,
            at.initial_indices,
            at.state_indices,
            impl=plan.statics.impl("wkv"),
        )

    return walk(run, [k, v], [], plan, cache, STATE_RECORDS)
