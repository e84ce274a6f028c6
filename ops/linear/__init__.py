"""Linear layers of one input, merged into one op."""

from torch_hybrid.ops.linear.op import IMPLEMENTATIONS, linear

__all__ = ["IMPLEMENTATIONS", "linear"]
