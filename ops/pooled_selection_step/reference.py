"""The oracle: the definitions of both parts, one after the other."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.gated_pooling import reference as pooling
from torch_hybrid.ops.gated_pooling.op import GatedPooling
from torch_hybrid.ops.select_blocks import reference as selection
from torch_hybrid.ops.select_blocks.op import SelectBlocks


def pooled_selection_step(
    q: Tensor,
    keys: Tensor,
    gates: Tensor,
    bias: Tensor,
    weights: Tensor | None,
    state: Tensor,
    block_keys: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    top_k: int,
) -> Tensor:
    """[T, top_k] int32: see the op."""
    pooled = pooling.gated_pooling(
        GatedPooling(
            keys, gates, bias, state, cu_seqlens, seq_lens, initial_indices, state_indices, impl=""
        )
    )
    index = (cu_seqlens, seq_lens, page_table, slot_mapping)
    size = bias.shape[0]
    given = (q, pooled, weights, block_keys, *index)
    return selection.select_blocks(SelectBlocks(*given, block_size=size, top_k=top_k, impl=""))
