"""Implementation "cudnn": prompts of one length that fill a step are attended to by cuDNN.

Any other call is one for implementation "triton", which is called for it: new tokens after a
prefix, and the chunks of one. Which of the two a causal call is was planned, and each has a
captured graph of its own.
"""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops import cudnn_attention
from torch_hybrid.ops.ragged_attention import _triton
from torch_hybrid.ops.ragged_attention.op import RaggedAttentionWithLse


def ragged_attention_with_lse(x: RaggedAttentionWithLse) -> tuple[Tensor, Tensor]:
    """Launch ``torch_hybrid::ragged_attention_with_lse``."""
    num_seqs = cudnn_attention.num_prompts(x.q, x.k, x.v, x.planned or ()) if x.causal else 0
    if num_seqs == 0:
        return _triton.ragged_attention_with_lse(x)
    return cudnn_attention.attend(x.q, x.k, x.v, num_seqs, scale=x.scale, with_lse=True)
