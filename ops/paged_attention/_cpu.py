"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.core.page_bounds import check_page_indices
from torch_hybrid.ops.native.call import kernel

_RUN = kernel(
    "paged_attention",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="cu_seqlens seq_lens page_table slot_mapping kv_scales q k v relative_bias kv out lse",
    integers="page_table_row num_tokens num_seqs num_pages page_size max_pages "
    "q_token q_head k_token k_head v_token v_head "
    "num_q_heads num_kv_heads head_dim window reach is_bf16 is_invariant num_threads",
    numbers="scale softcap",
)


def paged_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
    kv_scales: Tensor | None = None,
    relative_bias: Tensor | None = None,
    is_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``torch_hybrid::paged_attention_with_lse``, and of the op without."""
    num_tokens, num_q_heads, head_dim = q.shape
    _, num_pages, page_size, num_kv_heads, _ = kv.shape
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    in_range = _RUN(
        cu_seqlens,
        seq_lens,
        page_table,
        slot_mapping,
        kv_scales,
        q,
        k,
        v,
        relative_bias,
        kv,
        out,
        lse,
        page_table.stride(0),
        num_tokens,
        seq_lens.shape[0],
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
        window,
        0 if relative_bias is None else relative_bias.shape[2],
        q.dtype is torch.bfloat16,
        is_invariant,
        torch.get_num_threads(),
        scale,
        softcap,
    )
    if not in_range:
        check_page_indices(
            cu_seqlens,
            seq_lens,
            page_table,
            slot_mapping,
            num_pages=num_pages,
            page_size=page_size,
            window=window,
        )
    return out, lse
