"""Implementation "flashinfer": FlashInfer attends, as ``_flashinfer_plan`` planned it.

New rows are written by the kernel of implementation "triton", which also sets rows of padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.flashinfer.prefill import COMMON, kernels
from torch_hybrid.ops.paged_attention._flashinfer_plan import fa2_workspace, takes_fa3
from torch_hybrid.ops.paged_attention._triton_write import write_rows
from torch_hybrid.ops.paged_attention.op import PagedAttention


def paged_attention(x: PagedAttention) -> Tensor:
    """Launch ``torch_hybrid::paged_attention``."""
    q, kv, cu_seqlens, page_table, window = x.q, x.kv, x.cu_seqlens, x.page_table, x.window
    schedule, *tables, values = x.planned or ()
    num_tokens, num_q_heads, head_dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if num_tokens == 0 or page_table.shape[0] == 0:
        return out.zero_()
    padding_lse = q.new_empty(q.shape[:2], dtype=torch.float32)  # FlashInfer's own is not asked for
    write_rows(x, kv, out, padding_lse)
    offsets = values.tolist()
    if takes_fa3(num_tokens, page_table.shape[0], q.device):
        form, workspace = "fa3", schedule  # it cuts no sequence, and writes no partial results
        tables = [cu_seqlens, page_table.flatten(), x.seq_lens]  # of which it reads the pages alone
    else:
        form = "fa2"
        num_bytes = fa2_workspace(offsets, num_q_heads, head_dim)
        workspace = q.new_empty(num_bytes, dtype=torch.uint8)
    page_offsets, pages, last_page_lens = tables
    kernels(form, q.dtype, head_dim, head_dim, window > 0, x.softcap > 0).paged_run(
        float_workspace_buffer=workspace,
        int_workspace_buffer=schedule,
        plan_info_vec=offsets,
        q=q,
        paged_k_cache=kv[0],
        paged_v_cache=kv[1],
        qo_indptr=cu_seqlens,
        paged_kv_indptr=page_offsets,
        paged_kv_indices=pages,
        paged_kv_last_page_len=last_page_lens,
        o=out,
        maybe_lse=None,
        window_left=window - 1,
        logits_soft_cap=x.softcap,
        sm_scale=x.scale,
        scale_q=None,
        scale_k=None,
        scale_v=None,
        **COMMON,
        workspace_size=0,
    )
    return out
