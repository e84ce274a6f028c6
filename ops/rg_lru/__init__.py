"""Real-gated linear recurrent units over ragged sequences, with their states kept by slot."""

from torch_hybrid.ops.rg_lru.op import rg_lru

__all__ = ["rg_lru"]
