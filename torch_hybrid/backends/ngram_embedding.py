"""Embeddings of n-grams: their ops, and how a layer runs them."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.backends.recurrent import CONVOLUTION, OpChoice, Recurrence, RecurrentPlan
from torch_hybrid.ops.ngram_embedding import op

_LOOK_UP = OpChoice(
    name="ngram_embedding", implementations=op.IMPLEMENTATIONS, sizes=lambda spec: {}
)
NGRAM_EMBEDDING = Recurrence(decode=(_LOOK_UP, CONVOLUTION), extend=(_LOOK_UP, CONVOLUTION))


def look_up(
    tokens: Tensor,
    table: Tensor,
    multipliers: Tensor,
    head_sizes: Tensor,
    head_offsets: Tensor,
    eos: int,
    plan: RecurrentPlan,
    history: Tensor,
) -> Tensor:
    """The rows of the n-grams that end at tokens [T], side by side; advances ``history``."""
    return op.ngram_embedding(
        tokens,
        table,
        multipliers,
        head_sizes,
        head_offsets,
        history,
        plan.cu_seqlens,
        plan.initial_indices,
        plan.state_indices,
        eos=eos,
        impl=plan.statics.impl("ngram_embedding"),
    )
