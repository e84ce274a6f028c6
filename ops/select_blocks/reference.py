"""The oracle: one query at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.select_blocks.op import SelectBlocks


def scores_of(q: Tensor, weights: Tensor | None, block_keys: Tensor) -> Tensor:
    """Score blocks with keys [n, D] for one query [H, D] with weights [H]: [n]."""
    work = torch.promote_types(q.dtype, torch.float32)
    similar = torch.relu(q.to(work) @ block_keys.to(work).T)
    return similar.sum(0) if weights is None else weights @ similar


def select_blocks(x: SelectBlocks) -> Tensor:
    """Compute the op one query at a time."""
    q, weights, block_keys, block_size = x.q, x.weights, x.block_keys, x.block_size
    page_blocks = block_keys.shape[1]
    offsets, lengths = x.cu_seqlens.tolist(), x.seq_lens.tolist()
    for t in range(offsets[-1]):
        row, place = divmod(int(x.slot_mapping[t]), block_size)
        if place == block_size - 1:
            block_keys[row // page_blocks, row % page_blocks] = x.keys[t]

    chosen = x.new_chosen().fill_(-1)
    for n, length in enumerate(lengths):
        for t in range(offsets[n], offsets[n + 1]):
            position = length - offsets[n + 1] + t
            count = (position + 1) // block_size
            block = torch.arange(count, dtype=torch.int64, device=q.device)
            pages = x.page_table[n, block // page_blocks].long()
            seen = block_keys[pages, block % page_blocks]
            scores = scores_of(q[t], None if weights is None else weights[t], seen)
            best = scores.sort(descending=True, stable=True).indices[: x.top_k]
            chosen[t, : len(best)] = best.sort().values.int()
    return chosen
