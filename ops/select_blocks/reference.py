"""The oracle: one query at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def scores_of(q: Tensor, weights: Tensor | None, block_keys: Tensor) -> Tensor:
    """[n] of the blocks with keys [n, D], for one query [H, D] with weights [H]."""
    work = torch.promote_types(q.dtype, torch.float32)
    similar = torch.relu(q.to(work) @ block_keys.to(work).T)
    return similar.sum(0) if weights is None else weights @ similar


def select_blocks(
    q: Tensor,
    keys: Tensor,
    weights: Tensor | None,
    block_keys: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
    top_k: int,
) -> Tensor:
    """[T, top_k] int32: see the op."""
    page_blocks = block_keys.shape[1]
    offsets, lengths = cu_seqlens.tolist(), seq_lens.tolist()
    for t in range(offsets[-1]):
        row, place = divmod(int(slot_mapping[t]), block_size)
        if place == block_size - 1:
            block_keys[row // page_blocks, row % page_blocks] = keys[t]

    chosen = torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)
    for n, length in enumerate(lengths):
        for t in range(offsets[n], offsets[n + 1]):
            position = length - offsets[n + 1] + t
            count = (position + 1) // block_size
            block = torch.arange(count, dtype=torch.int64, device=q.device)
            pages = page_table[n, block // page_blocks].long()
            seen = block_keys[pages, block % page_blocks]
            scores = scores_of(q[t], None if weights is None else weights[t], seen)
            best = scores.sort(descending=True, stable=True).indices[:top_k]
            chosen[t, : len(best)] = best.sort().values.int()
    return chosen
