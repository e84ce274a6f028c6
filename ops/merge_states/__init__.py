"""Attention results over disjoint sets of keys, merged by their log-sum-exp."""

from torch_hybrid.ops.merge_states.op import merge_states

__all__ = ["merge_states"]
