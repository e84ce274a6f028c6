"""Kimi delta attention: a delta rule that decays by channel (Kimi-Linear, Ling-3)."""

from torch_hybrid.ops.kimi_delta_attention.op import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)

__all__ = ["chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"]
