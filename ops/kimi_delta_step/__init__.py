"""One token of each sequence through a Kimi-delta-attention mixer, between its projections."""

from torch_hybrid.ops.kimi_delta_step.op import kimi_delta_step

__all__ = ["kimi_delta_step"]
