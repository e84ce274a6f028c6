"""Real-gated linear recurrent units without pools, which a backward goes through."""

from torch_hybrid.ops.rg_lru.training.op import rg_lru_backward, rg_lru_forward

__all__ = ["rg_lru_backward", "rg_lru_forward"]
