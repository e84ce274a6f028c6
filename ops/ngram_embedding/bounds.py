"""Checks of the index tensors of an n-gram embedding, for indices that are on the host."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.core.state_bounds import check_state_indices


def check_indices(
    table: Tensor,
    head_sizes: Tensor,
    head_offsets: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    num_tokens: int,
    num_slots: int,
) -> None:
    """Raise ValueError unless all heads are within the table, all sequences among the tokens and
    their slots in the pool."""
    for head, (size, first) in enumerate(
        zip(head_sizes.tolist(), head_offsets.tolist(), strict=True)
    ):
        if size < 1 or first < 0 or first + size > len(table):
            raise ValueError(
                f"head {head} must have rows within the {len(table)} of the table, got {size} from "
                f"{first} on"
            )
    check_state_indices(
        cu_seqlens, initial_indices, state_indices, num_tokens=num_tokens, num_slots=num_slots
    )
