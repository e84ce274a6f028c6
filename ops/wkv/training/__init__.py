"""RWKV's weighted average of past values without pools, which a backward goes through."""

from torch_hybrid.ops.wkv.training.op import wkv_backward, wkv_forward

__all__ = ["wkv_backward", "wkv_forward"]
