"""Implementation "torch": both parts in vectorised torch, one after the other."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.gated_pooling._torch import gated_pooling
from torch_hybrid.ops.pooled_selection_step.op import PooledSelectionStep
from torch_hybrid.ops.select_blocks._torch import select_blocks


def pooled_selection_step(x: PooledSelectionStep) -> Tensor:
    """Launch ``torch_hybrid::pooled_selection_step``."""
    return select_blocks(x.selection(gated_pooling(x.pooling())))
