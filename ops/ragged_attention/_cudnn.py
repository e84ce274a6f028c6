"""Implementation "cudnn": sequences that attend to themselves alone do so by cuDNN.

Those are new tokens without a prefix. A call for other keys is one for implementation "triton":
chunks of a prefix, and new tokens together with a prefix. Which of the two a causal call is was
planned, and each has a captured graph of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_hybrid.ops import cudnn_attention
from torch_hybrid.ops.ragged_attention import _triton
from torch_hybrid.ops.triton.padding import set_padding


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
    if not causal or not cudnn_attention.attends(q, k, v, planned):
        return _triton.ragged_attention_with_lse(
            q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, scale=scale
        )
    out, lse = cudnn_attention.attend(q, k, v, cu_seqlens_q, scale=scale, with_lse=True)
    lse = lse.view(q.shape[:2])
    set_padding(out, lse, cu_seqlens_q)
    return out, lse
