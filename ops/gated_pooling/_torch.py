"""Implementation "torch": all complete blocks at once, behind what sequences had left."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.gated_pooling.op import GatedPooling


def gated_pooling(x: GatedPooling) -> Tensor:
    """Launch ``torch_hybrid::gated_pooling``."""
    keys, gates, bias, state = x.keys, x.gates, x.bias, x.state
    cu_seqlens, seq_lens, state_indices = x.cu_seqlens, x.seq_lens, x.state_indices
    num_tokens, size = keys.shape[0], bias.shape[0]
    num_new = cu_seqlens.diff()
    begins = (x.initial_indices == 0)[:, None, None, None]
    held = state[x.initial_indices].masked_fill(begins, 0).flatten(0, 1)
    rows = torch.cat([torch.stack([keys, gates], 1), held])

    def rows_of(tokens: Tensor, seqs: Tensor) -> Tensor:
        """Find rows of tokens by number; a number before a sequence's first is of its state."""
        back = tokens - cu_seqlens[seqs]
        before = (seq_lens - num_new)[seqs] % size + back
        return rows[torch.where(back >= 0, tokens, num_tokens + seqs * (size - 1) + before)]

    count = torch.arange(num_tokens, dtype=torch.int64, device=keys.device)
    seq = torch.searchsorted(cu_seqlens[1:], count.int(), right=True)
    count, seq = count[seq < len(seq_lens)], seq[seq < len(seq_lens)]
    position = seq_lens[seq] - cu_seqlens[1:][seq] + count
    is_last = position % size == size - 1
    last, seq = count[is_last], seq[is_last]
    place = torch.arange(size, dtype=torch.int64, device=keys.device)
    blocks = rows_of(last[:, None] - (size - 1) + place, seq[:, None])
    key, gate = blocks.to(torch.promote_types(keys.dtype, torch.float32)).unbind(2)
    weights = torch.softmax(gate + bias.to(gate.dtype), 1)
    out = torch.zeros_like(keys, memory_format=torch.contiguous_format)
    out[last] = (weights * key).sum(1).to(keys.dtype)

    is_stored = (num_new > 0) & (state_indices > 0)
    is_left = is_stored[:, None] & (place < (seq_lens % size)[:, None])
    seq, index = torch.nonzero(is_left).unbind(1)
    state[state_indices[seq], index] = rows_of(
        cu_seqlens[1:][seq] - seq_lens[seq] % size + index, seq
    )
    return out
