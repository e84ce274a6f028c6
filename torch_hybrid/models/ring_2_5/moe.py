"""The MLPs of Ring-2.5, and its mixture of experts with a group-limited router."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_hybrid.models.ring_2_5.config import Ring25Config


def linear(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Linear:
    """Make a projection without bias, on the meta device until it is loaded."""
    return nn.Linear(inputs, outputs, bias=False, dtype=dtype, device="meta")


class MLP(nn.Module):
    """An MLP, ``down(silu(gate x) * up x)``; one projection gives ``[gate | up]``."""

    def __init__(self, dim: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = linear(dim, 2 * width, dtype)
        self.down_proj = linear(width, dim, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, dim] to [T, dim]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class GroupLimitedRouter(nn.Module):
    """Router that chooses experts by biased sigmoid scores, within the best groups.

    A group's score is the sum of its two best. The weights of the experts come from the scores
    without bias.
    """

    expert_bias: Tensor

    def __init__(
        self, config: Ring25Config, dtype: torch.dtype, device: str | None = "meta"
    ) -> None:
        super().__init__()
        self.num_groups, self.topk_group = config.n_group, config.topk_group
        self.top_k, self.scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.weight = nn.Parameter(
            torch.empty(config.num_experts, config.hidden_size, dtype=dtype, device=device)
        )
        bias = torch.empty(config.num_experts, dtype=torch.float32, device=device)
        self.register_buffer("expert_bias", bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for x [T, dim]: ids and float32 weights, [T, k] each."""
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        groups = (scores + self.expert_bias).unflatten(-1, (self.num_groups, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(self.topk_group, dim=-1).indices
        is_best = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(1, best, True)
        eligible = groups.masked_fill(~is_best[..., None], -math.inf).flatten(1)
        expert_ids = eligible.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, expert_ids)
        if self.top_k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return expert_ids, weights * self.scale


class ExpertWeights(nn.Module):
    """Loaded weights of the routed experts, until an implementation takes them."""

    def __init__(self, config: Ring25Config, dtype: torch.dtype) -> None:
        super().__init__()
        count, dim, width = config.num_experts, config.hidden_size, config.moe_intermediate_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))

        self.gate_up_proj = parameter(count, 2 * width, dim)
        self.down_proj = parameter(count, dim, width)


class MixtureOfExperts(nn.Module):
    """The chosen experts of each token, and one shared MLP."""

    def __init__(self, config: Ring25Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = GroupLimitedRouter(config, dtype)
        self.experts: nn.Module = ExpertWeights(config, dtype)
        self.shared_experts = MLP(config.hidden_size, config.shared_width, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, dim] to [T, dim]."""
        out: Tensor = self.experts(x, *self.router(x)) + self.shared_experts(x)
        return out
