"""Causal attention within the sequences of packed rows, by kernels of torch that train."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.autograd import check_no_tangents
from torch_hybrid.ops.core.registration import first_impl
from torch_hybrid.ops.packed_attention import packed_attention_forward
from torch_hybrid.ops.packed_attention.reference import masked_attention
from torch_hybrid.training.flex_attention import attend_in_blocks


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    dropout: float = 0.0,
    blocks: Tensor | None = None,
    block_size: int = 1,
) -> Tensor:
    """Attend from each token to those before it in its sequence, and to itself.

    Args:
        q: [T, H, K], float dtype. k [T, HKV, K] and v [T, HKV, V] in that dtype.
        cu_seqlens: [N + 1] int32 offsets from 0 to T; equal ones are empty sequences.
        scale: factor on products.
        window: tokens that one attends to, itself among them; None for all.
        dropout: probability to drop a weight. Above 0, and on a GPU for float64, a T x T mask is
            made.
        blocks: [T, B] int32, or None: the complete blocks of its sequence that a token attends to,
            beside tokens after all complete ones, as :func:`pick_blocks` returns them.
        block_size: tokens in a block.

    Returns:
        [T, H, V].
    """
    check_no_tangents("packed_attention", q, k, v)
    if q.device.type == "cpu" and not dropout:
        return packed_attention_forward(
            *(q, k, v, cu_seqlens, blocks, None),
            scale=scale,
            window=window,
            block_size=block_size,
            impl=first_impl("packed_attention_forward", q.device, q.dtype),
        )[0]
    if q.is_cuda and not dropout and q.dtype != torch.float64:
        return attend_in_blocks(q, k, v, cu_seqlens, scale, window, blocks, block_size)
    return masked_attention(
        *(q, k, v, cu_seqlens),
        scale=scale,
        window=window,
        dropout=dropout,
        blocks=blocks,
        block_size=block_size,
    )
