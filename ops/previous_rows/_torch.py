"""Implementation "torch": gathers and scatters whose shapes do not depend on lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.previous_rows.op import PreviousRows


def previous_rows(call: PreviousRows) -> Tensor:
    """Launch ``torch_hybrid::previous_rows``."""
    x, tokens, kept, kept_tokens = call.x, call.tokens, call.kept, call.kept_tokens
    cu_seqlens, seq_lens = call.cu_seqlens, call.seq_lens
    initial_indices, state_indices = call.initial_indices, call.state_indices
    num_tokens, num_seqs, num_kept = x.shape[0], state_indices.shape[0], kept.shape[1]
    if not num_seqs:
        return torch.zeros_like(x)
    past = seq_lens - cu_seqlens.diff()
    last = (past - 1).clamp(min=0) % num_kept
    goes_on = (initial_indices > 0) & (past > 0)
    before, token_before = kept[initial_indices, last], kept_tokens[initial_indices, last]
    moves = goes_on & (state_indices != initial_indices)
    _keep(call, state_indices, last, before, token_before, moves)
    if not num_tokens:
        return torch.empty_like(x)

    count = torch.arange(num_tokens, dtype=torch.int32, device=x.device)
    seq = torch.searchsorted(cu_seqlens[1:], count, right=True)
    own, is_padding = seq.clamp(max=num_seqs - 1), seq == num_seqs
    place = (past[own] + count - cu_seqlens[own]) % num_kept
    # Of tokens that share a place, the last.
    is_kept = ~is_padding & (count >= cu_seqlens[own + 1] - num_kept)
    _keep(call, state_indices[own], place, x, tokens, is_kept)

    before = before.masked_fill(~goes_on[:, None], 0.0)
    out = x[(count - 1).clamp(min=0)]
    out = torch.where((count == cu_seqlens[own])[:, None], before[own], out)
    return out.masked_fill(is_padding[:, None], 0.0)


def _keep(
    call: PreviousRows,
    slots: Tensor,
    places: Tensor,
    rows: Tensor,
    tokens: Tensor,
    are_kept: Tensor,
) -> None:
    """Store those rows and tokens that are kept; slot 0 keeps what it has."""
    are_kept = are_kept & (slots > 0)
    at = torch.where(are_kept, slots, 0), torch.where(are_kept, places, 0)
    call.kept[at] = torch.where(are_kept[:, None], rows, call.kept[0, 0])
    call.kept_tokens[at] = torch.where(are_kept, tokens, call.kept_tokens[0, 0])
