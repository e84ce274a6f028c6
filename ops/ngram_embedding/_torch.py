"""Implementation "torch": each sequence behind its history in one long array."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_hybrid.ops.ngram_embedding.op import NgramEmbedding


def ngram_embedding(x: NgramEmbedding) -> Tensor:
    """Launch ``torch_hybrid::ngram_embedding``."""
    tokens, table, history, eos = x.tokens, x.table, x.history, x.eos
    multipliers, head_sizes, head_offsets = x.multipliers, x.head_sizes, x.head_offsets
    cu_seqlens, initial_indices, state_indices = x.cu_seqlens, x.initial_indices, x.state_indices
    num_tokens, num_seqs, num_back = tokens.shape[0], state_indices.shape[0], history.shape[1]
    count = torch.arange(num_tokens, dtype=torch.int64, device=tokens.device)
    seq = torch.searchsorted(cu_seqlens[1:], count.int(), right=True)
    place = count + (seq + 1) * num_back
    first = (
        cu_seqlens[:-1] + torch.arange(num_seqs, dtype=torch.int64, device=tokens.device) * num_back
    )
    before = torch.arange(num_back, dtype=torch.int64, device=tokens.device)
    text = tokens.new_full((num_tokens + (num_seqs + 1) * num_back,), eos)
    text[place] = tokens
    begins = (initial_indices == 0)[:, None]
    text[first[:, None] + before] = history[initial_indices].masked_fill(begins, eos)

    hashed, ended = tokens * multipliers[0], torch.zeros_like(tokens, dtype=torch.bool)
    rows = []
    for back, sizes in enumerate(head_sizes.view(num_back, -1), start=1):
        token = text[place - back]
        ended = ended | (token == eos)
        hashed = hashed ^ (token.masked_fill(ended, eos) * multipliers[back])
        rows.append(hashed[:, None] % sizes)
    named = (torch.cat(rows, 1) + head_offsets).to(table.device)
    out = F.embedding(named, table).to(tokens.device).flatten(1)

    is_stored = (state_indices > 0) & (cu_seqlens.diff() > 0)
    last = first + cu_seqlens.diff()
    history[state_indices[is_stored]] = text[last[is_stored][:, None] + before]
    return out.masked_fill((seq == num_seqs)[:, None], 0.0)
