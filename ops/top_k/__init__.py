"""The k largest of each row, and where they stand."""

from torch_hybrid.ops.top_k.op import top_k

__all__ = ["top_k"]
