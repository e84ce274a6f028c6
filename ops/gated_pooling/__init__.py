"""Keys of blocks of tokens: means of their tokens' keys, weighed by gates."""

from torch_hybrid.ops.gated_pooling.op import gated_pooling

__all__ = ["gated_pooling"]
