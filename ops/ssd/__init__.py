"""State-space duality: linear attention with a scalar decay (Mamba2 and lightning attention)."""

from torch_hybrid.ops.ssd.op import chunk_ssd, recurrent_ssd

__all__ = ["chunk_ssd", "recurrent_ssd"]
