"""The sum of the elements of each row, or of their squares."""

from torch_hybrid.ops.power_sum.op import power_sum

__all__ = ["power_sum"]
