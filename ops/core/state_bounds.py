"""Check of sequences that lie one after the other, for offsets that are on the host."""

from __future__ import annotations

from torch import Tensor


def check_offsets(cu_seqlens: Tensor, *, num_tokens: int) -> None:
    """Raise ValueError unless offsets rise from 0 and stay among the tokens."""
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or sorted(offsets) != offsets or offsets[-1] > num_tokens:
        raise ValueError(f"cu_seqlens must rise from 0 to at most {num_tokens}, got {offsets}")
