"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native.call import kernel
from torch_hybrid.ops.ragged_attention.op import RaggedAttentionWithLse

_RUN = kernel(
    "ragged_attention",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="q k v out lse cu_seqlens_q cu_seqlens_k",
    integers="q_token q_head k_token k_head v_token v_head "
    "num_queries num_keys num_seqs num_heads num_k_heads head_dim v_head_dim "
    "causal is_bf16 num_threads",
    numbers="scale",
)


def ragged_attention_with_lse(x: RaggedAttentionWithLse) -> tuple[Tensor, Tensor]:
    """Launch ``torch_hybrid::ragged_attention_with_lse``."""
    q, k, v = x.q, x.k, x.v
    num_queries, num_heads, head_dim = q.shape
    num_keys, num_k_heads, v_head_dim = v.shape
    out = q.new_empty(num_queries, num_heads, v_head_dim)
    lse = q.new_empty(num_queries, num_heads, dtype=torch.float32)
    in_range = _RUN(
        q,
        k,
        v,
        out,
        lse,
        x.cu_seqlens_q,
        x.cu_seqlens_k,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        num_queries,
        num_keys,
        x.cu_seqlens_q.shape[0] - 1,
        num_heads,
        num_k_heads,
        head_dim,
        v_head_dim,
        x.causal,
        q.dtype is torch.bfloat16,
        torch.get_num_threads(),
        x.scale,
    )
    if not in_range:
        x.check_indices()
    return out, lse
