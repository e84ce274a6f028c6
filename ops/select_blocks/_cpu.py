"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.core.page_bounds import check_page_indices
from torch_hybrid.ops.native.call import kernel

_RUN = kernel(
    "select_blocks",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="cu_seqlens seq_lens page_table slot_mapping q keys weights block_keys chosen",
    integers="page_table_row num_tokens num_seqs num_pages page_size max_pages "
    "q_token q_head key_token num_heads index_dim block_size top_k is_bf16 num_threads",
)


def select_blocks(
    q: Tensor,
    keys: Tensor,
    weights: Tensor | None,
    block_keys: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
    top_k: int,
) -> Tensor:
    """Launcher of ``torch_hybrid::select_blocks``."""
    num_tokens, num_heads, index_dim = q.shape
    num_pages, page_size = block_keys.shape[0], block_keys.shape[1] * block_size
    chosen = q.new_empty((num_tokens, top_k), dtype=torch.int32)
    in_range = _RUN(
        cu_seqlens,
        seq_lens,
        page_table,
        slot_mapping,
        q,
        keys,
        weights,
        block_keys,
        chosen,
        page_table.stride(0),
        num_tokens,
        seq_lens.shape[0],
        num_pages,
        page_size,
        page_table.shape[1],
        q.stride(0),
        q.stride(1),
        keys.stride(0),
        num_heads,
        index_dim,
        block_size,
        top_k,
        q.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    if not in_range:
        check_page_indices(
            cu_seqlens,
            seq_lens,
            page_table,
            slot_mapping,
            num_pages=num_pages,
            page_size=page_size,
        )
    return chosen
