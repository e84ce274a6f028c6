"""Implementation "flashinfer_trtllm": TensorRT-LLM's kernels in FlashInfer, for Blackwell.

One is for a token of each sequence, the other for any number. FlashInfer has them as binaries,
which it downloads unless the package flashinfer-cubin is installed; for sizes that are not among
them it raises an error. New rows are written by the kernel of implementation "triton". They never
ran: what is tested is the translation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hybrid.ops.flashinfer.blackwell import workspace
from torch_hybrid.ops.paged_attention._triton_write import write_rows
from torch_hybrid.ops.triton.padding import set_padding


def paged_attention(
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
    planned: Sequence[Tensor],
) -> Tensor:
    """Launcher of ``torch_hybrid::paged_attention``."""
    if softcap:
        raise ValueError(f"impl 'flashinfer_trtllm' has no softcap, got {softcap}")
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache
    from flashinfer.prefill import trtllm_batch_context_with_kv_cache

    key_lens, first_keys, most = planned
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    num_seqs, longest = page_table.shape[0], page_table.shape[1] * kv.shape[2]
    if q.shape[0] == 0 or num_seqs == 0:
        return out.zero_()
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)  # of rows of padding
    write_rows(k, v, kv, cu_seqlens, slot_mapping, out, lse)
    num_new = most.item()  # a tensor on the host
    common = {
        "query": q,
        "kv_cache": (kv[0], kv[1]),
        "workspace_buffer": workspace(q.device),
        "block_tables": page_table,
        "seq_lens": key_lens,
        "bmm1_scale": scale,
        "bmm2_scale": 1.0,
        "window_left": window - 1,
        "out": out,
        "kv_layout": "NHD",
        "backend": "trtllm-gen",
    }
    if num_new == 0:
        trtllm_batch_decode_with_kv_cache(**common, max_seq_len=longest)
    else:
        trtllm_batch_context_with_kv_cache(
            **common,
            max_q_len=num_new,
            max_kv_len=longest,
            batch_size=num_seqs,
            cum_seq_lens_q=cu_seqlens,
            cum_seq_lens_kv=first_keys,
        )
    set_padding(out, lse, cu_seqlens)
    return out
