"""Experts that a backward goes through."""

from torch_hybrid.ops.fused_experts.training.op import (
    fused_experts_backward,
    fused_experts_forward,
)

__all__ = ["fused_experts_backward", "fused_experts_forward"]
