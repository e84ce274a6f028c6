"""The oracle: one token at a time, in Python's integers."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def ngram_embedding(
    tokens: Tensor,
    table: Tensor,
    multipliers: Tensor,
    head_sizes: Tensor,
    head_offsets: Tensor,
    history: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    eos: int,
) -> Tensor:
    """[T, heads * D]: see the op."""
    factors, sizes, starts = (x.tolist() for x in (multipliers, head_sizes, head_offsets))
    num_back, offsets = len(factors) - 1, cu_seqlens.tolist()
    heads_per_order = len(sizes) // num_back
    out = table.new_zeros(len(tokens), len(sizes), table.shape[1])
    kept = {}
    for n, (first, end) in enumerate(pairwise(offsets)):
        if first == end:
            continue
        initial = int(initial_indices[n])
        text = history[initial].tolist() if initial else [eos] * num_back
        text += tokens[first:end].tolist()
        kept[int(state_indices[n])] = text[-num_back:]
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
