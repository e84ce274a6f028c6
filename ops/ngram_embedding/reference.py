"""The oracle: one token at a time, in Python's integers."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from torch_hybrid.ops.ngram_embedding.op import NgramEmbedding


def ngram_embedding(x: NgramEmbedding) -> Tensor:
    """Compute the op one token at a time."""
    tokens, table, history, eos = x.tokens, x.table, x.history, x.eos
    hashes = (x.multipliers, x.head_sizes, x.head_offsets)
    factors, sizes, starts = (numbers.tolist() for numbers in hashes)
    num_back, offsets = len(factors) - 1, x.cu_seqlens.tolist()
    heads_per_order = len(sizes) // num_back
    out = table.new_zeros(len(tokens), len(sizes), table.shape[1])
    kept = {}
    for n, (first, end) in enumerate(pairwise(offsets)):
        if first == end:
            continue
        initial = int(x.initial_indices[n])
        text = history[initial].tolist() if initial else [eos] * num_back
        text += tokens[first:end].tolist()
        kept[int(x.state_indices[n])] = text[-num_back:]
        for t in range(first, end):
            at = t - first + num_back
            hashed, ended = text[at] * factors[0], False
            for back in range(1, num_back + 1):
                ended = ended or text[at - back] == eos
                hashed ^= (eos if ended else text[at - back]) * factors[back]
                for head in range((back - 1) * heads_per_order, back * heads_per_order):
                    out[t, head] = table[starts[head] + hashed % sizes[head]]
    for slot, last in kept.items():
        if slot:
            history[slot] = torch.tensor(last, dtype=torch.int64, device=history.device)
    return out.flatten(1)
