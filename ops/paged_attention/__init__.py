"""Attention over paged keys and values: writes the new ones into the pages and attends."""

from torch_hybrid.ops.paged_attention.op import paged_attention, paged_attention_with_lse

__all__ = ["paged_attention", "paged_attention_with_lse"]
