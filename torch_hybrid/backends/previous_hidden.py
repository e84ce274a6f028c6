"""The hidden state of the token before each one, which a head that drafts reads."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.backends.recurrent import OpChoice, Recurrence, RecurrentPlan
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.ops.previous_rows import op
from torch_hybrid.specs import RECORDS

_PREVIOUS_ROWS = OpChoice(
    name="previous_rows",
    implementations=op.IMPLEMENTATIONS,
    sizes=lambda spec: {},
    preferred=lambda backends: "auto",
)
PREVIOUS_HIDDEN = Recurrence(
    decode=(_PREVIOUS_ROWS,), extend=(_PREVIOUS_ROWS,), verify=_PREVIOUS_ROWS
)


def previous_hidden(hidden: Tensor, plan: RecurrentPlan, cache: LayerCache) -> Tensor:
    """The rows before those of ``hidden`` [T, dim]; keeps the last ones for the next step."""
    return op.previous_rows(
        hidden,
        cache["last"],
        None if plan.accepted is None else cache[RECORDS],
        plan.cu_seqlens,
        plan.initial_indices,
        plan.state_indices,
        plan.accepted,
        impl=plan.statics.impl("previous_rows"),
    )
