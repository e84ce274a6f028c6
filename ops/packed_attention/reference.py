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
    blocks: Tensor | None = None,
    block_size: int = 1,
) -> Tensor:
    """Attend from each token to those before it in its sequence, and to itself.

    Args:
        q: [T, H, K]. k [T, HKV, K] and v [T, HKV, V] in its dtype.
        cu_seqlens: [N + 1] int32 offsets of the sequences.
        scale: factor on products.
        window: tokens that one attends to, itself among them; None for all.
        dropout: probability to drop a weight.
        blocks: [T, B] int32 complete blocks that a query sees, or None.
        block_size: tokens in a block.

    Returns:
        [T, H, V].
    """
    row = torch.arange(len(q), dtype=cu_seqlens.dtype, device=q.device)
    seq = torch.searchsorted(cu_seqlens, row, right=True)
    sees = (seq[:, None] == seq) & (row[:, None] >= row)
    if window is not None:
        sees &= row[:, None] - row < window
    if blocks is not None:
        position = row - cu_seqlens[seq - 1]
        sees &= seen_blocks(blocks, position, position // block_size, block_size)
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


def seen_blocks(blocks: Tensor, position: Tensor, of_key: Tensor, block_size: int) -> Tensor:
    """Tell which keys queries [Q] see by the blocks [K] that these are in: [Q, K].

    Args:
        blocks: [Q, B] int32 complete blocks that queries see.
        position: [Q] place of each query in its sequence.
        of_key: [K] number of each key's block in its sequence.
        block_size: tokens in a block.
    """
    done = (position + 1) // block_size
    return named_blocks(blocks, len(of_key), block_size)[:, of_key] | (of_key >= done[:, None])


def named_blocks(blocks: Tensor, num_tokens: int, block_size: int) -> Tensor:
    """Mark the blocks of sequences of at most so many tokens that ``blocks`` [Q, B] names."""
    none = num_tokens // block_size + 1  # where those go that are none
    marks = blocks.new_zeros((blocks.shape[0], none + 1), dtype=torch.bool)
    return marks.scatter(1, blocks.where(blocks >= 0, none).long(), True)
