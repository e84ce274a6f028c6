"""Delta rules without pools, which a backward goes through: forms to train with."""

from torch_hybrid.ops.delta_rule.training.op import (
    gated_delta_rule_backward,
    gated_delta_rule_forward,
    kimi_delta_attention_backward,
    kimi_delta_attention_forward,
)

__all__ = [
    "gated_delta_rule_backward",
    "gated_delta_rule_forward",
    "kimi_delta_attention_backward",
    "kimi_delta_attention_forward",
]
