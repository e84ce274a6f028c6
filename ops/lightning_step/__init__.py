"""One token of each sequence through a lightning-attention mixer, between its projections."""

from torch_hybrid.ops.lightning_step.op import lightning_step

__all__ = ["lightning_step"]
