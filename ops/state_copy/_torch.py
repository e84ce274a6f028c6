"""Implementation "torch": index_select and index_copy_.

On a device the indices are not read. So the op has a fixed shape and can be captured in a CUDA
graph: a skipped pair rewrites the null index with what it holds. On a CPU skipped pairs are left
out: a copy of the null index for each costs as much as a real one.
"""

from __future__ import annotations

import torch

from torch_hybrid.ops.state_copy.op import StateCopy


def state_copy(x: StateCopy) -> None:
    """Read all sources of a pool, clear those of the null index, and write them."""
    src, dst, dim = x.src, x.dst, x.dim
    if not x.pools or not src.numel():
        return
    if src.device.type == "cpu":
        src, dst = src[dst != 0], dst[dst != 0]
    skipped = dst == 0
    cleared = (src == 0) & ~skipped
    sources = torch.where(skipped, 0, src).long()
    targets = dst.long()
    for pool in x.pools:
        rows = pool.index_select(dim, sources)
        shape = [-1 if i == dim else 1 for i in range(pool.dim())]
        rows.masked_fill_(cleared.view(shape), 0)
        pool.index_copy_(dim, targets, rows)
