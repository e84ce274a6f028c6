"""One token of each sequence through a gated-delta-rule mixer, between its projections."""

from torch_hybrid.ops.gated_delta_step.op import gated_delta_step

__all__ = ["gated_delta_step"]
