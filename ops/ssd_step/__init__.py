"""One token of each sequence through a Mamba2 mixer, between its projections."""

from torch_hybrid.ops.ssd_step.op import ssd_step

__all__ = ["ssd_step"]
