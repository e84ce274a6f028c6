"""The experts of each token and their weights, from a router's logits."""

from torch_hybrid.ops.route.op import route

__all__ = ["route"]
