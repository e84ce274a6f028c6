"""The experts of a mixture-of-experts MLP, in one op."""

from torch_hybrid.ops.fused_experts.op import IMPLEMENTATIONS, fused_experts

__all__ = ["IMPLEMENTATIONS", "fused_experts"]
