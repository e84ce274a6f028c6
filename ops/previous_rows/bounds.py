"""Checks of the index tensors, for indices that are on the host."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.state_bounds import check_state_indices
from torch_hybrid.ops.verify import check_counts


def check_indices(
    last: Tensor,
    records: Tensor | None,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    accepted: Tensor | None,
    num_tokens: int,
) -> None:
    """Raise ValueError unless all sequences are among the tokens, their slots in the pool, and
    their counts those of records that there are."""
    check_state_indices(
        cu_seqlens,
        initial_indices,
        state_indices,
        num_tokens=num_tokens,
        num_slots=len(last),
    )
    if records is not None and accepted is not None:
        check_counts(records, cu_seqlens, initial_indices, accepted)
