"""State-space duality: linear attention with a scalar decay (Mamba2 and lightning attention)."""

from torch_hybrid.ops.ssd.op import ssd
from torch_hybrid.ops.ssd.op_step_lightning import lightning_step
from torch_hybrid.ops.ssd.op_step_mamba2 import ssd_step

__all__ = ["lightning_step", "ssd", "ssd_step"]
