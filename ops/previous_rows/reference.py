"""The oracle: one sequence at a time."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor


def previous_rows(
    x: Tensor,
    last: Tensor,
    records: Tensor | None,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    accepted: Tensor | None,
) -> Tensor:
    """[T, D]: see the op."""
    out = x.new_zeros(x.shape)
    counts = [0] * len(state_indices) if accepted is None else accepted.tolist()
    kept = []
    for n, (first, end) in enumerate(pairwise(cu_seqlens.tolist())):
        initial, count = int(initial_indices[n]), counts[n]
        before = x.new_zeros(x.shape[1])
        if initial:
            before = last[initial].clone()
            if count and records is not None:
                before = records[initial, count - 1].clone()
        own = x[first:end]
        if len(own):
            out[first] = before
            out[first + 1 : end] = own[:-1]
        kept.append((int(state_indices[n]), count, before, own))
    for slot, count, before, own in kept:
        if not slot:
            continue
        if accepted is None:
            if len(own):
                last[slot] = own[-1]
            continue
        assert records is not None
        if len(own) or count:
            last[slot] = own[0] if len(own) else before
        if len(own) > 1:
            records[slot, : len(own) - 1] = own[1:]
    return out
