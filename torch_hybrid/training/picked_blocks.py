"""Attention to the blocks of tokens that an indexer picks, within the sequences of packed rows.

A sequence is cut into blocks, its first token begins one. A token picks among the blocks that are
complete where it stands, and attends to their tokens, and to those after them up to itself. No
gradient reaches what picks, as in transformers: a choice has none.

Rows [B, S] hold the sequences. A row's complete blocks are numbered from 0 through all of its
sequences; there are P - 1 at most.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from torch_hybrid.packing import Packing


def pick_blocks(
    q: Tensor,
    keys: Tensor,
    weights: Tensor | None,
    packing: Packing,
    *,
    block_size: int,
    top_k: int,
) -> Tensor:
    """Mark the blocks of highest score, ``sum_h weights[h] * relu(q[h] . key)``, for each token.

    Of equal scores the earlier block is taken, as by ``select_blocks``.

    Args:
        q: [B, S, H, D] index queries, float32 or better.
        keys: [B, S, D] in q's dtype: the key of the block that a token is the last of. Those of
            other tokens are not read.
        weights: [B, S, H] in q's dtype, or None: all are 1.
        packing: of the B * S tokens.
        block_size: tokens in a block.
        top_k: most blocks that a token picks.

    Returns:
        [B, S, P] bool.
    """
    num_rows, num_tokens, dim = keys.shape
    number = torch.arange(num_tokens // block_size + 1, dtype=torch.int64, device=q.device)
    _, done, count = _blocks(packing, num_rows, block_size)
    last = torch.searchsorted(count, (number + 1).expand(num_rows, -1).contiguous())
    last = last.clamp(max=num_tokens - 1)[..., None].expand(-1, -1, dim)
    block_keys = keys.gather(1, last).mT
    similar = torch.relu(q.flatten(1, 2) @ block_keys).view(*q.shape[:3], -1)
    scores = similar.sum(2) if weights is None else (weights[:, :, None] @ similar)[:, :, 0]
    count, done = count[..., None], done[..., None]
    is_complete = (number < count) & (number >= count - done)
    scores = scores.masked_fill(~is_complete, -torch.inf)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return torch.zeros_like(is_complete).scatter(-1, best, True) & is_complete


def attend_to_picked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    picked: Tensor,
    packing: Packing,
    *,
    block_size: int,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Attend to the tokens of picked blocks, and to those after all complete ones.

    Args:
        q: [B * S, H, K], float dtype. k [B * S, HKV, K] and v [B * S, HKV, V] in that dtype.
        picked: [B, S, P] bool.
        packing: of the B * S tokens.
        block_size: tokens in a block.
        scale: factor on products.
        dropout: probability to drop a weight.

    Returns:
        [B * S, H, V].
    """
    shape = num_rows, num_tokens = picked.shape[:2]
    is_last, done, count = _blocks(packing, num_rows, block_size)
    sequence, position = packing.sequences.view(shape), packing.positions.view(shape)
    block = (count - is_last.long())[:, None].expand(-1, num_tokens, -1)
    is_seen = picked.gather(2, block) | ((position // block_size)[:, None] >= done[..., None])
    is_before = position[:, None] <= position[..., None]
    mask = is_seen & is_before & (sequence[:, None] == sequence[..., None])
    q, k, v = (each.unflatten(0, shape).transpose(1, 2) for each in (q, k, v))
    out = scaled_dot_product_attention(
        *(q, k, v, mask[:, None], dropout),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).flatten(0, 1)


def over_block(x: Tensor, block_size: int) -> Tensor:
    """View x [B, S, D] as [B, S, D, block_size]: each token after those before it in its block.

    The view is meaningful at the last tokens of blocks; other windows reach out of their blocks.
    """
    return pad(x, (0, 0, block_size - 1, 0)).unfold(1, block_size, 1)


def _blocks(packing: Packing, num_rows: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tell which tokens [B, S] are the last of a block, and how many blocks are complete there: of
    a token's sequence, and of its row."""
    position = packing.positions.view(num_rows, -1)
    is_last = position % block_size == block_size - 1
    return is_last, (position + 1) // block_size, is_last.cumsum(1)
