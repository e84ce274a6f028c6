"""Checks of the index tensors of a recurrent op, for indices that are on the host."""

from __future__ import annotations

from torch import Tensor


def check_state_indices(
    cu_seqlens: Tensor, state_indices: Tensor, *, num_tokens: int, num_slots: int
) -> None:
    """Raise ValueError unless all sequences are among the tokens, and their slots in the pool."""
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or sorted(offsets) != offsets or offsets[-1] > num_tokens:
        raise ValueError(f"cu_seqlens must rise from 0 to at most {num_tokens}, got {offsets}")
    for slot in state_indices.tolist():
        if not 0 <= slot < num_slots:
            raise ValueError(f"state_indices must be in [0, {num_slots}), got {slot}")
