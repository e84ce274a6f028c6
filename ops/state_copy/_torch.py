"""Implementation "torch": index_select and index_copy_.

On a device the indices are not read, so that the op has a fixed shape and can be captured in a CUDA
graph: a skipped pair rewrites the null index with what it holds. On a CPU skipped pairs are left
out, because a copy of the null index for each of them costs as much as a real one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hybrid.ops.state_copy.pairs import check_pairs


def state_copy(pools: Sequence[Tensor], src: Tensor, dst: Tensor, *, dim: int) -> None:
    """Launcher of ``torch_hybrid::state_copy``."""
    if not pools or not src.numel():
        return
    if src.device.type == "cpu":
        check_pairs(src.tolist(), dst.tolist(), pools[0].shape[dim])
        src, dst = src[dst != 0], dst[dst != 0]
    skipped = dst == 0
    cleared = (src == 0) & ~skipped
    sources = torch.where(skipped, 0, src).long()
    targets = dst.long()
    for pool in pools:
        rows = pool.index_select(dim, sources)
        shape = [-1 if i == dim else 1 for i in range(pool.dim())]
        rows.masked_fill_(cleared.view(shape), 0)
        pool.index_copy_(dim, targets, rows)
