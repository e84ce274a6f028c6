"""The oracle: the definitions of both parts, one after the other."""

from __future__ import annotations

from torch import Tensor

from torch_hybrid.ops.gated_pooling import reference as pooling
from torch_hybrid.ops.pooled_selection_step.op import PooledSelectionStep
from torch_hybrid.ops.select_blocks import reference as selection


def pooled_selection_step(x: PooledSelectionStep) -> Tensor:
    """Compute both parts, as they are defined."""
    return selection.select_blocks(x.selection(pooling.gated_pooling(x.pooling())))
