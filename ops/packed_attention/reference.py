"""Mathematics of attention within packed sequences: one T x T mask, differentiable.

It is the oracle of the tests, and what trains where no kernel of torch takes lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend from each token to those before it in its sequence, and to itself.

    Args:
        q: [T, H, K]. k [T, HKV, K] and v [T, HKV, V] in its dtype.
        cu_seqlens: [N + 1] int32 offsets of the sequences.
        scale: factor on products.
        window: tokens that one attends to, itself among them; None for all.
        dropout: probability to drop a weight.

    Returns:
        [T, H, V].
    """
    row = torch.arange(len(q), dtype=cu_seqlens.dtype, device=q.device)
    seq = torch.searchsorted(cu_seqlens, row, right=True)
    sees = (seq[:, None] == seq) & (row[:, None] >= row)
    if window is not None:
        sees &= row[:, None] - row < window
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=sees,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)
