"""Norms of rows that are gated before or after, to train with."""

from torch_hybrid.ops.gated_norm.op import gated_norm_backward, gated_norm_forward

__all__ = ["gated_norm_backward", "gated_norm_forward"]
