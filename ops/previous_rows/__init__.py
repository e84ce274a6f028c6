"""The row before each token's, across the steps of a sequence."""

from torch_hybrid.ops.previous_rows.op import previous_rows

__all__ = ["previous_rows"]
