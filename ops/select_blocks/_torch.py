"""Implementation "torch": one sequence at a time, some of its queries at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_hybrid.ops.select_blocks.op import SelectBlocks

# Queries per product: bounds the scores to [H, _QUERIES, blocks].
_QUERIES = 128


def select_blocks(x: SelectBlocks) -> Tensor:
    """Launch ``torch_hybrid::select_blocks``."""
    q, keys, weights, block_keys = x.q, x.keys, x.weights, x.block_keys
    block_size, top_k, page_blocks = x.block_size, x.top_k, x.block_keys.shape[1]
    offsets, lengths = x.cu_seqlens.tolist(), x.seq_lens.tolist()
    slots = x.slot_mapping[: offsets[-1]].long()
    is_last = slots % block_size == block_size - 1
    rows = slots[is_last] // block_size
    block_keys.view(-1, block_keys.shape[-1])[rows] = keys[: offsets[-1]][is_last]

    chosen = x.new_chosen().fill_(-1)
    for n, length in enumerate(lengths):
        for begin in range(offsets[n], offsets[n + 1], _QUERIES):
            end = min(begin + _QUERIES, offsets[n + 1])
            first = length - offsets[n + 1] + begin
            num_blocks = (first + end - begin) // block_size
            if num_blocks == 0:
                continue
            pages = x.page_table[n, : -(-num_blocks // page_blocks)].long()
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
    """Score blocks [n, D] for queries [t, H, D]: [t, n]."""
    work = torch.promote_types(q.dtype, torch.float32)
    similar = torch.relu(q.to(work) @ keys.to(work).T)
    return similar.sum(1) if weights is None else (weights[:, None] @ similar)[:, 0]
