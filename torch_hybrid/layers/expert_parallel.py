"""Expert parallelism: each rank has whole experts, and the ranks send their tokens to them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.ranks import Ranks


class ExpertParallel(nn.Module):
    """Experts of a mixture, divided among ranks, for the tokens of all ranks.

    Every rank has tokens of its own, equally many. It sends a token to each rank that has one of
    the token's experts, and adds up what comes back. Sizes are static, so that a step is one graph.
    The buffer to each rank has a row for every token, so no token is ever dropped. A row that the
    other rank does not need names no expert, and costs its transfer alone.

    Args:
        experts: all experts, of which this rank keeps its own.
        ranks: ranks that share the experts; the last have fewer if the division is uneven.
    """

    def __init__(self, experts: FusedExperts, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.num_experts = experts.down_proj.shape[0]
        self.num_each = -(-self.num_experts // ranks.size)
        first = min(ranks.rank * self.num_each, self.num_experts)
        self.num_own = min(self.num_each, self.num_experts - first)

        def own(weight: Tensor) -> nn.Parameter:
            part = weight.detach().narrow(0, first, self.num_own)
            return nn.Parameter(part.clone(), requires_grad=False)

        self.experts = FusedExperts(
            own(experts.gate_up_proj),
            own(experts.down_proj),
            activation=experts.activation,
            limit=experts.limit,
            softcaps=experts.softcaps,
            impl=experts.choice.impl,
        )

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Run the tokens of this rank through their experts, wherever those are.

        Args:
            x: [C, dim]; C is the same on every rank.
            expert_ids: [C, k], from 0; the number of experts stands for none.
            expert_weights: [C, k].

        Returns:
            [C, dim].
        """
        ranks = self.ranks
        rows, ids = self._address(x, expert_ids)
        # Ids are exact in float32, and travel with the weights.
        routes = torch.cat([ids.float(), expert_weights.float().repeat(ranks.size, 1)], dim=1)
        received = ranks.exchange(rows)
        ids, weights = ranks.exchange(routes).chunk(2, dim=1)
        out = self.experts(received, ids.int(), weights.contiguous())
        returned: Tensor = ranks.exchange(out).unflatten(0, (ranks.size, x.shape[0]))
        return returned.sum(0)

    def _address(self, x: Tensor, expert_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Compute what to send to the R ranks: rows [R * C, dim], and expert ids [R * C, k].

        Ids count from the receiver's first expert.
        """
        ranks = torch.arange(self.ranks.size, dtype=torch.int64, device=x.device)
        starts = self.num_each * ranks[:, None, None]
        local = expert_ids - starts  # [R, C, k]
        is_there = (local >= 0) & (local < self.num_each) & (expert_ids < self.num_experts)
        rows = torch.where(is_there.any(-1, keepdim=True), x, 0)
        none = (self.num_experts - starts).clamp(0, self.num_each)  # how many experts a rank has
        return rows.flatten(0, 1), torch.where(is_there, local, none).flatten(0, 1)


class TokensOfRank(nn.Module):
    """Experts for tokens that all ranks have: each rank routes a part of the tokens.

    A rank's output is zero for the tokens of other ranks; the caller sums outputs over ranks.
    """

    def __init__(self, experts: ExpertParallel) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Run x [T, dim] through experts, by ids and weights [T, k] -> [T, dim]."""
        ranks, num_tokens = self.experts.ranks, x.shape[0]
        # One more than needed, so that it is never 1: that size would be a graph of its own.
        part = (num_tokens + ranks.size - 1) // ranks.size + 1
        rest = part * ranks.size - num_tokens
        first = ranks.rank * part

        def own(rows: Tensor, fill: int) -> Tensor:
            return F.pad(rows, (0, 0, 0, rest), value=fill).narrow(0, first, part)

        out = self.experts(
            own(x, 0), own(expert_ids, self.experts.num_experts), own(expert_weights, 0)
        )
        return F.pad(out, (0, 0, first, part * ranks.size - first - part)).narrow(0, 0, num_tokens)
