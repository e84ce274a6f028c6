"""Embeddings of n-grams: choices of ops, and calls of them."""

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
from torch_hybrid.ops.ngram_embedding import op
from torch_hybrid.specs import STATE_RECORDS

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
    cache: LayerCache,
) -> Tensor:
    """Look up the rows of the n-grams that end at tokens [T], and advance the history."""

    def run(advancing: Sequence[Tensor], reading: Sequence[Tensor], at: At) -> Tensor:
        (column,) = advancing
        return op.ngram_embedding(
            column[:, 0],
            table,
            multipliers,
            head_sizes,
            head_offsets,
            cache["tokens"],
            at.cu_seqlens,
            at.initial_indices,
            at.state_indices,
            eos=eos,
            impl=plan.statics.impl("ngram_embedding"),
        )

    return walk(run, [tokens[:, None]], [], plan, cache, STATE_RECORDS)
