"""A linear layer for each head."""

from torch_hybrid.ops.head_linear.op import head_linear

__all__ = ["head_linear"]
