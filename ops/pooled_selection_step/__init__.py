"""Indexer of pooled blocks for one new token of each sequence, as one op."""

from torch_hybrid.ops.pooled_selection_step.op import pooled_selection_step

__all__ = ["pooled_selection_step"]
