"""Implementation "torch": one sequence at a time, some of its queries at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_hybrid.ops.core.page_bounds import check_page_indices

# Queries per product: bounds the scores to [H, _QUERIES, blocks].
_QUERIES = 128


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
    """Launcher of ``torch_hybrid::select_blocks``."""
    num_pages, page_blocks = block_keys.shape[:2]
    if q.device.type == "cpu":
        check_page_indices(
            cu_seqlens,
            seq_lens,
            page_table,
            slot_mapping,
            num_pages=num_pages,
            page_size=page_blocks * block_size,
        )
    offsets, lengths = cu_seqlens.tolist(), seq_lens.tolist()
    slots = slot_mapping[: offsets[-1]].long()
    is_last = slots % block_size == block_size - 1
    rows = slots[is_last] // block_size
    block_keys.view(-1, block_keys.shape[-1])[rows] = keys[: offsets[-1]][is_last]

    chosen = torch.full((q.shape[0], top_k), -1, dtype=torch.int32, device=q.device)
    for n, length in enumerate(lengths):
        for begin in range(offsets[n], offsets[n + 1], _QUERIES):
            end = min(begin + _QUERIES, offsets[n + 1])
            first = length - offsets[n + 1] + begin
            num_blocks = (first + end - begin) // block_size
            if num_blocks == 0:
                continue
            pages = page_table[n, : -(-num_blocks // page_blocks)].long()
            seen = block_keys[pages].flatten(0, 1)[:num_blocks]
            scores = _scores(q[begin:end], None if weights is None else weights[begin:end], seen)
            position = torch.arange(first, first + end - begin, dtype=torch.int64, device=q.device)
            visible = ((position + 1) // block_size)[:, None]
            block = torch.arange(num_blocks, dtype=torch.int64, device=q.device)
            # Hidden ones come after the others, and are then told by their numbers.
            scores.masked_fill_(block >= visible, -math.inf)
            best = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
            best = best.masked_fill(best >= visible, num_blocks).sort(dim=1).values
            chosen[begin:end, : best.shape[1]] = best.masked_fill(best == num_blocks, -1).int()
    return chosen


def _scores(q: Tensor, weights: Tensor | None, keys: Tensor) -> Tensor:
    """Of queries [t, H, D] and blocks [n, D]: [t, n]."""
    work = torch.promote_types(q.dtype, torch.float32)
    similar = torch.relu(q.to(work) @ keys.to(work).T)
    return similar.sum(1) if weights is None else (weights[:, None] @ similar)[:, 0]
