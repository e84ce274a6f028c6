"""The oracle: one sequence at a time."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor


def previous_rows(
    x: Tensor,
    tokens: Tensor,
    kept: Tensor,
    kept_tokens: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> Tensor:
    """[T, D]: see the op."""
    out, num_kept = x.new_zeros(x.shape), kept.shape[1]
    for n, (first, end) in enumerate(pairwise(cu_seqlens.tolist())):
        initial, slot = int(initial_indices[n]), int(state_indices[n])
        past = int(seq_lens[n]) - (end - first)
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
            kept[slot, place], kept_tokens[slot, place] = x[t], tokens[t]
    return out
