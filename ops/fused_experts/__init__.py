"""The experts of a mixture-of-experts MLP, in one op."""

from torch_hybrid.ops.fused_experts.op import IMPLEMENTATIONS, fused_experts
from torch_hybrid.ops.fused_experts.op_expert_linear import expert_linear

__all__ = ["IMPLEMENTATIONS", "expert_linear", "fused_experts"]
