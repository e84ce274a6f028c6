"""Checks of the index tensors of a recurrent op, for indices that are on the host."""

from __future__ import annotations

from torch import Tensor


def check_offsets(cu_seqlens: Tensor, *, num_tokens: int) -> None:
    """Raise ValueError unless offsets rise from 0 and stay among the tokens."""
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or sorted(offsets) != offsets or offsets[-1] > num_tokens:
        raise ValueError(f"cu_seqlens must rise from 0 to at most {num_tokens}, got {offsets}")


def check_state_indices(
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    num_tokens: int,
    num_slots: int,
) -> None:
    """Raise ValueError unless all sequences are among the tokens and their slots in the pool, and
    none starts from a slot that another one writes."""
    check_offsets(cu_seqlens, num_tokens=num_tokens)
    read, written = initial_indices.tolist(), state_indices.tolist()
    for name, slots in {"initial_indices": read, "state_indices": written}.items():
        for slot in slots:
            if not 0 <= slot < num_slots:
                raise ValueError(f"{name} must be in [0, {num_slots}), got {slot}")
    is_live = cu_seqlens.diff().tolist()
    taken = {slot: n for n, slot in enumerate(written) if is_live[n]}
    for n, slot in enumerate(read):
        if slot and is_live[n] and taken.get(slot, n) != n:
            raise ValueError(
                f"sequence {n} must not start from slot {slot}, which sequence {taken[slot]} writes"
            )
