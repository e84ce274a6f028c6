"""Attention with biases by distance within packed sequences, by what trains of torch."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.autocast import without_autocast
from torch_hybrid.ops.core.autograd import check_no_tangents
from torch_hybrid.ops.core.registration import first_impl
from torch_hybrid.ops.packed_attention import packed_attention_forward
from torch_hybrid.ops.packed_attention.reference import masked_attention_with_biases
from torch_hybrid.training.flex_attention import attend_with_biases


@without_autocast
def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attend from each token to those before it in its sequence, and to itself.

    Args:
        q: [T, H, K], float dtype. k [T, HKV, K] and v [T, HKV, V] in that dtype.
        bias: [T, H, R] in that dtype: what a query adds to the logit of the key at each distance.
            Those at R or more have 0.
        cu_seqlens: [N + 1] int32 offsets from 0 to T; equal ones are empty sequences.
        scale: factor on products.
        window: tokens that one attends to, itself among them; None for all.
        dropout: probability to drop a weight. Above 0, and on a GPU for float64, T x T weights are
            made.

    Returns:
        [T, H, V], and the logarithms [T, H] of sums of weights, float32 or float64.
    """
    check_no_tangents("biased_attention", q, k, v, bias)
    if dropout or (q.is_cuda and q.dtype == torch.float64):
        return masked_attention_with_biases(
            *(q, k, v, bias, cu_seqlens), scale=scale, window=window, dropout=dropout
        )
    if q.is_cuda:
        return attend_with_biases(q, k, v, bias, cu_seqlens, scale, window)
    given = (q, k, v, cu_seqlens, None, bias)
    impl = first_impl("packed_attention_forward", q.device, q.dtype)
    return packed_attention_forward(*given, scale=scale, window=window, impl=impl)
