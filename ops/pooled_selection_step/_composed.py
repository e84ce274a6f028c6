"""Implementation "composed": an op for each part, of sequences of any lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from torch_hybrid.ops.composed import first_parts
from torch_hybrid.ops.gated_pooling.op import gated_pooling
from torch_hybrid.ops.pooled_selection_step.op import PooledSelectionStep
from torch_hybrid.ops.replay import Segments, call_twice
from torch_hybrid.ops.select_blocks.op import select_blocks


def pooled_selection_step(x: PooledSelectionStep) -> Tensor:
    """Launch ``torch_hybrid::pooled_selection_step`` by its parts."""
    parts = x.parts or first_parts(x.q, "gated_pooling", "select_blocks")

    def pool(
        advancing: Sequence[Tensor], reading: Sequence[Tensor], at: PooledSelectionStep | Segments
    ) -> Tensor:
        keys, gates = advancing
        return gated_pooling(
            keys,
            gates,
            x.bias,
            x.state,
            at.cu_seqlens,
            at.seq_lens,
            at.initial_indices,
            at.state_indices,
            impl=parts.impl("gated_pooling"),
        )

    if parts.replay is None or parts.records is None:
        pooled = pool([x.keys, x.gates], [], x)
    else:
        pooled = call_twice(pool, [x.keys, x.gates], [], parts.replay, parts.records)
    select: Callable[..., Tensor] = select_blocks  # which takes a value of its class too
    return select(x.selection(pooled, parts.impl("select_blocks")))
