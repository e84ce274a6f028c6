"""Implementation "cudnn": prompts of one length that fill a step are attended to by cuDNN.

Any other call is one for implementation "triton", which is called for it: new tokens after a
prefix, and the chunks of one. Which of the two a causal call is was planned, and each has a
captured graph of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_hybrid.ops import cudnn_attention
from torch_hybrid.ops.ragged_attention import _triton


def ragged_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool,
    scale: float,
    planned: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Launcher of ``torch_hybrid::ragged_attention_with_lse``."""
    num_seqs = cudnn_attention.num_prompts(q, k, v, planned) if causal else 0
    if num_seqs == 0:
        return _triton.ragged_attention_with_lse(
            q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, scale=scale
        )
    return cudnn_attention.attend(q, k, v, num_seqs, scale=scale, with_lse=True)
