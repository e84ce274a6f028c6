"""Implementation "cpp": the C++ kernel of _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native.call import kernel
from torch_hybrid.ops.ragged_attention.bounds import check_offsets

_RUN = kernel(
    "ragged_attention",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="q k v out lse cu_seqlens_q cu_seqlens_k",
    integers="q_token q_head k_token k_head v_token v_head "
    "num_queries num_keys num_seqs num_heads num_k_heads head_dim v_head_dim "
    "causal is_bf16 num_threads",
    numbers="scale",
)


def ragged_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``torch_hybrid::ragged_attention_with_lse``."""
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
        cu_seqlens_q,
        cu_seqlens_k,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        num_queries,
        num_keys,
        cu_seqlens_q.shape[0] - 1,
        num_heads,
        num_k_heads,
        head_dim,
        v_head_dim,
        causal,
        q.dtype is torch.bfloat16,
        torch.get_num_threads(),
        scale,
    )
    if not in_range:
        check_offsets(q, k, cu_seqlens_q, cu_seqlens_k)
    return out, lse
