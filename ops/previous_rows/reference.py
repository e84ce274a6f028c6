"""The oracle: one sequence at a time."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from torch_hybrid.ops.previous_rows.op import PreviousRows


def previous_rows(call: PreviousRows) -> Tensor:
    """Compute the op one token at a time."""
    x, kept, kept_tokens = call.x, call.kept, call.kept_tokens
    out, num_kept = x.new_zeros(x.shape), kept.shape[1]
    for n, (first, end) in enumerate(pairwise(call.cu_seqlens.tolist())):
        initial, slot = int(call.initial_indices[n]), int(call.state_indices[n])
        past = int(call.seq_lens[n]) - (end - first)
        last = (past - 1) % num_kept
        goes_on = initial > 0 and past > 0
        if end > first:
            out[first] = kept[initial, last] if goes_on else 0.0
            out[first + 1 : end] = x[first : end - 1]
        if not slot:
            continue
        if goes_on:
            kept[slot, last] = kept[initial, last]
            kept_tokens[slot, last] = kept_tokens[initial, last]
        for t in range(first, end):
            place = (past + t - first) % num_kept
            kept[slot, place], kept_tokens[slot, place] = x[t], call.tokens[t]
    return out
