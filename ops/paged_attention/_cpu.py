"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native.call import kernel
from torch_hybrid.ops.paged_attention.op import Pages

_RUN = kernel(
    "paged_attention",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="cu_seqlens seq_lens page_table slot_mapping kv_scales q k v relative_bias kv out lse",
    integers="page_table_row num_tokens num_seqs num_pages page_size max_pages "
    "q_token q_head k_token k_head v_token v_head "
    "num_q_heads num_kv_heads head_dim window reach is_bf16 is_invariant num_threads",
    numbers="scale softcap",
)


def paged_attention_with_lse(x: Pages, *, is_invariant: bool = False) -> tuple[Tensor, Tensor]:
    """Launch ``torch_hybrid::paged_attention_with_lse``, and the op without.

    Args:
        x: arguments of the op.
        is_invariant: whether a token has the bits that it has alone.
    """
    q, k, v, kv, page_table, bias = x.q, x.k, x.v, x.kv, x.page_table, x.relative_bias
    num_tokens, num_q_heads, head_dim = q.shape
    _, num_pages, page_size, num_kv_heads, _ = kv.shape
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    in_range = _RUN(
        x.cu_seqlens,
        x.seq_lens,
        page_table,
        x.slot_mapping,
        x.kv_scales,
        q,
        k,
        v,
        bias,
        kv,
        out,
        lse,
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
        v.stride(0),
        v.stride(1),
        num_q_heads,
        num_kv_heads,
        head_dim,
        x.window,
        0 if bias is None else bias.shape[2],
        q.dtype is torch.bfloat16,
        is_invariant,
        torch.get_num_threads(),
        x.scale,
        x.softcap,
    )
    if not in_range:
        x.check_indices()
    return out, lse
