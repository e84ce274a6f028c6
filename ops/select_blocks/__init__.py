"""The blocks of past tokens that each query attends to: the best by an indexer's scores."""

from torch_hybrid.ops.select_blocks.op import select_blocks

__all__ = ["select_blocks"]
