"""Gated delta rule: linear attention with a decaying state (Qwen3-Next, Qwen3.5, OLMo-hybrid)."""

from torch_hybrid.ops.gated_delta_rule.op import (
    chunk_gated_delta_rule,
    recurrent_gated_delta_rule,
)

__all__ = ["chunk_gated_delta_rule", "recurrent_gated_delta_rule"]
