"""Clear and copy the pages and slots of several pools in one op."""

from torch_hybrid.ops.state_copy.op import state_copy

__all__ = ["state_copy"]
