"""The oracle: read every source, then write every destination."""

from __future__ import annotations

import torch

from torch_hybrid.ops.state_copy.op import StateCopy


def state_copy(x: StateCopy) -> None:
    """Set ``pool[dst[i]] = pool[src[i]]`` in each pool: zeros for src 0, nothing for dst 0."""
    pairs = [(s, d) for s, d in zip(x.src.tolist(), x.dst.tolist(), strict=True) if d]
    for pool in x.pools:
        rows = {d: pool.select(x.dim, s).clone() for s, d in pairs}
        for s, d in pairs:
            pool.select(x.dim, d).copy_(rows[d] if s else torch.zeros_like(rows[d]))
