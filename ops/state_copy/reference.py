"""The oracle: read every source, then write every destination."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def state_copy(pools: Sequence[Tensor], src: Tensor, dst: Tensor, *, dim: int) -> None:
    """For each pool: ``pool[dst[i]] = pool[src[i]]``, zeros for src 0, nothing for dst 0."""
    pairs = [(s, d) for s, d in zip(src.tolist(), dst.tolist(), strict=True) if d]
    for pool in pools:
        rows = {d: pool.select(dim, s).clone() for s, d in pairs}
        for s, d in pairs:
            pool.select(dim, d).copy_(rows[d] if s else torch.zeros_like(rows[d]))
