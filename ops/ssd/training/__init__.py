"""Linear attention with a scalar decay without pools, which a backward goes through."""

from torch_hybrid.ops.ssd.training.op import ssd_backward, ssd_forward

__all__ = ["ssd_backward", "ssd_forward"]
