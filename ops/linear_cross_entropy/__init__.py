"""Cross entropy of a head's logits that never exist whole, to train with."""

from torch_hybrid.ops.linear_cross_entropy.op import (
    IGNORED,
    linear_cross_entropy_backward,
    linear_cross_entropy_forward,
)

__all__ = ["IGNORED", "linear_cross_entropy_backward", "linear_cross_entropy_forward"]
