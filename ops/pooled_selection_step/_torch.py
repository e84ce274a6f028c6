"""Implementation "torch": both parts in vectorised torch, one after the other."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.conv_step import check_lengths
from torch_hybrid.ops.core.page_bounds import check_page_indices
from torch_hybrid.ops.gated_pooling._torch import gated_pooling
from torch_hybrid.ops.gated_pooling.op import GatedPooling
from torch_hybrid.ops.select_blocks._torch import select_blocks
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
    """Launcher of ``torch_hybrid::pooled_selection_step``."""
    pooling = GatedPooling(
        keys, gates, bias, state, cu_seqlens, seq_lens, initial_indices, state_indices, impl="torch"
    )
    index = (cu_seqlens, seq_lens, page_table, slot_mapping)
    size = bias.shape[0]
    if q.device.type == "cpu":  # before the first part writes
        num_pages, page_blocks = block_keys.shape[:2]
        check_page_indices(*index, num_pages=num_pages, page_size=page_blocks * size)
        check_lengths(cu_seqlens)
        pooling.check_indices()
    pooled = gated_pooling(pooling)
    given = (q, pooled, weights, block_keys, *index)
    return select_blocks(SelectBlocks(*given, block_size=size, top_k=top_k, impl="torch"))
