"""Implementation "cudnn": prompts of one length that fill a step are attended to by cuDNN.

It reads the rows of the step, not the pages they are written to. Any other step is one for
implementation "triton", which is called for it: which of the two it is was planned, and each has a
captured graph of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops import cudnn_attention
from torch_hybrid.ops.paged_attention import _triton
from torch_hybrid.ops.paged_attention._triton_write import write_rows
from torch_hybrid.ops.paged_attention.op import PagedAttention


def paged_attention(x: PagedAttention) -> Tensor:
    """Launch ``torch_hybrid::paged_attention``."""
    num_seqs = cudnn_attention.num_prompts(x.q, x.k, x.v, x.planned or ())
    if num_seqs == 0:
        return _triton.paged_attention_with_lse(x)[0]
    out, _ = cudnn_attention.attend(x.q, x.k, x.v, num_seqs, scale=x.scale, with_lse=False)
    padding_lse = x.q.new_empty(x.q.shape[:2], dtype=torch.float32)  # no row is padding
    write_rows(x, x.kv, out, padding_lse)
    return out
