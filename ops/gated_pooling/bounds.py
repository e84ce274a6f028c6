"""Checks of the index tensors of gated pooling, for indices that are on the host."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.core.state_bounds import check_state_indices


def check_indices(
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    num_tokens: int,
    num_slots: int,
) -> None:
    """Raise ValueError unless all sequences are among the tokens, as long as these at least, and
    their slots in the pool."""
    check_state_indices(
        cu_seqlens, initial_indices, state_indices, num_tokens=num_tokens, num_slots=num_slots
    )
    for n, (new, length) in enumerate(
        zip(cu_seqlens.diff().tolist(), seq_lens.tolist(), strict=True)
    ):
        if length < new:
            raise ValueError(f"seq_lens[{n}] must be at least its {new} new tokens, got {length}")
