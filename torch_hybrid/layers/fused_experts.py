"""The experts of a mixture, each token through its own few, in one op."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_hybrid.backends.select import select
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.formats.stored_weights import features_of, name_of
from torch_hybrid.ops.fused_experts.op import HAS_GATE, IMPLEMENTATIONS, fused_experts
from torch_hybrid.ranks import Ranks, divide


class FusedExperts(nn.Module):
    """E MLPs, of which each token takes k.

    Args:
        gate_up_proj: [E, 2 I, dim], gate rows before up rows; [E, I, dim] where there is no gate.
        down_proj: [E, dim, I].
        activation: "silu", of a gate, or "relu2", without one.
        limit, softcaps: bounds of gate and up, as ``fused_experts`` takes them.
        impl: an implementation of ``fused_experts``, or "auto": the first that can serve the
            weights as they are now. A runner chooses anew, by its ``Backends``.

    Attributes:
        choice: what is called.
    """

    op = "fused_experts"
    implementations = IMPLEMENTATIONS

    def __init__(
        self,
        gate_up_proj: nn.Parameter,
        down_proj: nn.Parameter,
        *,
        activation: str = "silu",
        limit: float | None = None,
        softcaps: tuple[float, float] | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        self.activation, self.limit, self.softcaps = activation, limit, softcaps
        self.gate_up_scales: nn.Parameter | None = None
        self.down_scales: nn.Parameter | None = None
        self._dtype: torch.dtype | None = None  # of tokens, where weights have another
        self.choice = select(self.op, IMPLEMENTATIONS, self.need, impl)

    def hold_scales(
        self,
        gate_up_proj: nn.Parameter,
        down_proj: nn.Parameter,
        gate_up_scales: nn.Parameter,
        down_scales: nn.Parameter,
        *,
        dtype: torch.dtype,
    ) -> None:
        """Take smaller weights with scales in the place of others.

        Args:
            gate_up_proj, down_proj, gate_up_scales, down_scales: as ``fused_experts`` takes them.
            dtype: of the tokens.
        """
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        self.gate_up_scales, self.down_scales, self._dtype = gate_up_scales, down_scales, dtype
        self.choice = select(self.op, IMPLEMENTATIONS, self.need)

    @property
    def dtype(self) -> torch.dtype:
        """Of the tokens."""
        return self._dtype or self.down_proj.dtype

    @property
    def need(self) -> Need:
        """What serves the weights, where they are now."""
        features = features_of(self.down_proj.dtype)
        return Need(device=self.down_proj.device, dtype=self.dtype, features=features)

    @property
    def kind(self) -> str:
        """What a runner chooses an implementation for."""
        stored = self.down_proj.dtype
        return self.op if self.down_scales is None else f"{name_of(stored)} {self.op}"

    @in_own_dtype(1, lambda experts: experts.dtype)
    def forward(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """x [T, dim], expert_ids and expert_weights [T, k] -> [T, dim]."""
        return fused_experts(
            x,
            expert_ids,
            expert_weights,
            self.gate_up_proj,
            self.down_proj,
            gate_up_scales=self.gate_up_scales,
            down_scales=self.down_scales,
            activation=self.activation,
            limit=self.limit,
            softcaps=self.softcaps,
            impl=self.choice.impl,
        )

    def shard(self, ranks: Ranks) -> FusedExperts:
        """This rank's part of the width of every expert; the ranks' outputs are to be summed.

        Raises:
            UnsupportedError: the ranks do not divide the width.
        """
        width = self.down_proj.shape[2]
        divide("the width of the experts", width, ranks.size)
        blocks = [(width, 1)] * (1 + HAS_GATE[self.activation])
        return FusedExperts(
            ranks.parameter(self.gate_up_proj, blocks, dim=1),
            ranks.parameter(self.down_proj, [(width, 1)], dim=2),
            activation=self.activation,
            limit=self.limit,
            softcaps=self.softcaps,
            impl=self.choice.impl,
        )
