"""Implementation "cudnn": prompts of one length that fill a step are attended to by cuDNN.

It reads the rows of the step, not the pages they are written to. Any other step is one for
implementation "triton", which is called for it: which of the two it is was planned, and each has a
captured graph of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hybrid.ops import cudnn_attention
from torch_hybrid.ops.paged_attention import _triton
from torch_hybrid.ops.paged_attention._triton_write import write_rows


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
    num_seqs = cudnn_attention.num_prompts(q, k, v, planned)
    if num_seqs == 0:
        out, _ = _triton.paged_attention_with_lse(
            q,
            k,
            v,
            kv,
            cu_seqlens,
            seq_lens,
            page_table,
            slot_mapping,
            scale=scale,
            window=window,
            softcap=softcap,
        )
        return out
    out, _ = cudnn_attention.attend(q, k, v, num_seqs, scale=scale, with_lse=False)
    padding_lse = q.new_empty(q.shape[:2], dtype=torch.float32)  # there is no padding in the step
    write_rows(k, v, kv, cu_seqlens, slot_mapping, out, padding_lse)
    return out
