"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native.call import kernel
from torch_hybrid.ops.select_blocks.op import SelectBlocks

_RUN = kernel(
    "select_blocks",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="cu_seqlens seq_lens page_table slot_mapping q keys weights block_keys chosen",
    integers="page_table_row num_tokens num_seqs num_pages page_size max_pages "
    "q_token q_head key_token num_heads index_dim block_size top_k is_bf16 num_threads",
)


def select_blocks(x: SelectBlocks) -> Tensor:
    """Launch ``torch_hybrid::select_blocks``."""
    num_tokens, num_heads, index_dim = x.q.shape
    num_pages, page_blocks = x.block_keys.shape[:2]
    chosen = x.new_chosen()
    in_range = _RUN(
        x.cu_seqlens,
        x.seq_lens,
        x.page_table,
        x.slot_mapping,
        x.q,
        x.keys,
        x.weights,
        x.block_keys,
        chosen,
        x.page_table.stride(0),
        num_tokens,
        x.seq_lens.shape[0],
        num_pages,
        page_blocks * x.block_size,
        x.page_table.shape[1],
        x.q.stride(0),
        x.q.stride(1),
        x.keys.stride(0),
        num_heads,
        index_dim,
        x.block_size,
        x.top_k,
        x.q.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    if not in_range:
        x.check_indices()
    return chosen
