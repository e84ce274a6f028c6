"""Checks of the offsets, for implementations whose offsets are on the host."""

from __future__ import annotations

from torch import Tensor


def check_offsets(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Raise ValueError unless the offsets rise from 0 to at most the number of rows."""
    for name, tensor, rows in (("q", cu_seqlens_q, q.shape[0]), ("k", cu_seqlens_k, k.shape[0])):
        offsets = tensor.tolist()
        if offsets[0] != 0 or sorted(offsets) != offsets or offsets[-1] > rows:
            raise ValueError(f"cu_seqlens_{name} must rise from 0 to at most {rows}, got {offsets}")
