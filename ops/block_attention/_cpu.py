"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.block_attention.op import BlockAttention
from torch_hybrid.ops.native.call import kernel

_RUN = kernel(
    "block_attention",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="cu_seqlens seq_lens page_table slot_mapping blocks q k v kv out",
    integers="page_table_row num_tokens num_seqs num_pages page_size max_pages "
    "q_token q_head k_token k_head v_token v_head "
    "num_q_heads num_kv_heads head_dim block_size top_k is_bf16 is_invariant num_threads",
    numbers="scale",
)


def block_attention(x: BlockAttention, *, is_invariant: bool = False) -> Tensor:
    """Launch ``torch_hybrid::block_attention``."""
    q, v, page_table = x.q, x.v, x.page_table
    num_tokens, num_q_heads, head_dim = q.shape
    (k, *_), kv = x.by_head()
    _, num_pages, page_size, num_kv_heads, _ = kv.shape
    out = q.new_empty(q.shape)
    in_range = _RUN(
        x.cu_seqlens,
        x.seq_lens,
        page_table,
        x.slot_mapping,
        x.blocks,
        q,
        k,
        v,
        kv,
        out,
        page_table.stride(0),
        num_tokens,
        x.seq_lens.shape[0],
        num_pages,
        page_size,
        page_table.shape[1],
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        0 if v is None else v.stride(0),
        0 if v is None else v.stride(1),
        num_q_heads,
        num_kv_heads,
        head_dim,
        x.block_size,
        x.blocks.shape[1],
        q.dtype is torch.bfloat16,
        is_invariant,
        torch.get_num_threads(),
        x.scale,
    )
    if not in_range:
        x.check_indices()
    return out
