"""Delta rules: linear attention whose state decays and is corrected towards each value.

Gated delta rule: one decay a head (Qwen3-Next, Qwen3.5, OLMo-hybrid). Kimi delta attention: one a
channel (Kimi-Linear, Ling-3).
"""

from torch_hybrid.ops.delta_rule.op import gated_delta_rule, kimi_delta_attention
from torch_hybrid.ops.delta_rule.op_step_gated import gated_delta_step
from torch_hybrid.ops.delta_rule.op_step_kimi import kimi_delta_step

__all__ = ["gated_delta_rule", "gated_delta_step", "kimi_delta_attention", "kimi_delta_step"]
