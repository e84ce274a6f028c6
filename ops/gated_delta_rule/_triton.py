"""Implementation "triton" of the recurrent form, shared with Kimi delta attention."""

from torch_hybrid.ops.triton.delta_recurrent import (
    recurrent_delta_rule as recurrent_gated_delta_rule,
)

__all__ = ["recurrent_gated_delta_rule"]
