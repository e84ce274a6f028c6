"""State-space duality: linear attention with a scalar decay (Mamba2 and lightning attention)."""

from torch_hybrid.ops.ssd.op import chunk_ssd, recurrent_ssd
from torch_hybrid.ops.ssd.op_step_lightning import lightning_step
from torch_hybrid.ops.ssd.op_step_mamba2 import ssd_step

__all__ = ["chunk_ssd", "lightning_step", "recurrent_ssd", "ssd_step"]
