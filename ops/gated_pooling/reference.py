"""The oracle: one block at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.gated_pooling.op import GatedPooling


def gated_pooling(x: GatedPooling) -> Tensor:
    """Compute the op one block at a time."""
    keys, bias, state = x.keys, x.bias, x.state
    size, work = bias.shape[0], torch.promote_types(keys.dtype, torch.float32)
    both = torch.stack([keys, x.gates], 1)  # [T, 2, D]
    offsets, lengths = x.cu_seqlens.tolist(), x.seq_lens.tolist()
    slots = zip(x.initial_indices.tolist(), x.state_indices.tolist(), strict=True)
    out = torch.zeros_like(keys, memory_format=torch.contiguous_format)
    for n, (initial, slot) in enumerate(slots):
        begin, end, length = offsets[n], offsets[n + 1], lengths[n]
        if begin == end:
            continue
        before = (length - (end - begin)) % size  # tokens of the first block that came earlier
        held = state[initial, :before] if initial else torch.zeros_like(state[0, :before])
        for first in range(begin - before, end, size):
            block = torch.cat([held, both[begin:end]])[first - begin + before :][:size]
            if len(block) == size:
                key, gate = block.to(work).unbind(1)
                weights = torch.softmax(gate + bias.to(work), 0)
                out[first + size - 1] = (weights * key).sum(0).to(keys.dtype)
            elif slot:
                state[slot, : len(block)] = block.clone()
    return out
