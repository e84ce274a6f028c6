"""Mathematics of attention within packed sequences: one T x T mask, differentiable.

It is the oracle of the tests, and what trains where no kernel of torch takes lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad, scaled_dot_product_attention


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
    sees = _seen(row, seq, window)
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


def masked_attention_with_biases(
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
    """Attend likewise by T x T weights, to whose logits ``bias`` [T, H, R] is added by distance.

    Returns:
        [T, H, V], and the logarithms [T, H] of sums of weights, float32 or float64.
    """
    row = torch.arange(len(q), dtype=torch.int64, device=q.device)
    seq = torch.searchsorted(cu_seqlens, row.int(), right=True)
    before = (row[:, None] - row).masked_fill(~_seen(row, seq, window), -1)
    work = torch.promote_types(q.dtype, torch.float32)
    qs, ks, vs = (
        x.to(work).transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (q, k, v)
    )
    logits = (qs * scale) @ ks.mT + added_by_distance(bias, before)
    lse = logits.logsumexp(-1)
    weights = drop((logits - lse[..., None]).exp(), dropout)
    return (weights @ vs).transpose(0, 1).to(q.dtype), lse.T


def added_by_distance(bias: Tensor, before: Tensor) -> Tensor:
    """Compute what biases [Q, H, R] add to logits [H, Q, K] of keys so far ``before`` queries.

    That is 0 from R on, and -inf at negative distances [Q, K].
    """
    bias = bias[..., : before.shape[1]].transpose(0, 1)  # no key is farther
    reach = bias.shape[2]
    bias = pad(pad(bias, (0, 1)), (0, 1), value=-torch.inf)
    place = torch.where(before >= 0, before.clamp(max=reach), reach + 1)
    return bias.gather(-1, place.expand(len(bias), -1, -1))


def by_distance(logits: Tensor, reach: int) -> Tensor:
    """Find the values [..., Q, min(R, K)] at each distance of keys from the last Q of them."""
    num_queries, num_keys = logits.shape[-2:]
    row = torch.arange(num_keys - num_queries, num_keys, dtype=torch.int64, device=logits.device)
    key = row[:, None] - torch.arange(min(reach, num_keys), dtype=torch.int64, device=row.device)
    found = logits.gather(-1, key.clamp(min=0).expand(*logits.shape[:-2], -1, -1))
    return found.masked_fill_(key < 0, 0.0)


def _seen(row: Tensor, seq: Tensor, window: int | None) -> Tensor:
    """Tell which of all tokens [T] each one sees, by its number and its sequence's: [T, T]."""
    sees = (seq[:, None] == seq) & (row[:, None] >= row)
    return sees if window is None else sees & (row[:, None] - row < window)


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
