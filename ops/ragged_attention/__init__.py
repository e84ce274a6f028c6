"""Attention over packed sequences of any lengths, with its log-sum-exp."""

from torch_hybrid.ops.ragged_attention.op import ragged_attention_with_lse

__all__ = ["ragged_attention_with_lse"]
