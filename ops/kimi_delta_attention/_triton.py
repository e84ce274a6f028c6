"""Implementation "triton" of the recurrent form, shared with the gated delta rule."""

from torch_hybrid.ops.triton.delta_recurrent import (
    recurrent_delta_rule as recurrent_kimi_delta_attention,
)

__all__ = ["recurrent_kimi_delta_attention"]
