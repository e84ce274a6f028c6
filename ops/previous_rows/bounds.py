"""Checks of the index tensors, for indices that are on the host."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.core.state_bounds import check_state_indices


def check_indices(
    kept: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    num_tokens: int,
) -> None:
    """Raise ValueError unless all sequences are among the tokens, their slots in the pool, and
    their lengths those of their new tokens at least."""
    check_state_indices(
        cu_seqlens,
        initial_indices,
        state_indices,
        num_tokens=num_tokens,
        num_slots=len(kept),
    )
    lengths = cu_seqlens.diff().tolist()
    for n, (total, new) in enumerate(zip(seq_lens.tolist(), lengths, strict=True)):
        if total < new:
            raise ValueError(f"seq_lens must be at least {new} for sequence {n}, got {total}")
