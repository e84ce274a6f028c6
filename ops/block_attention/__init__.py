"""Attention over chosen blocks of paged keys and values, and over what no block holds yet."""

from torch_hybrid.ops.block_attention.op import block_attention

__all__ = ["block_attention"]
