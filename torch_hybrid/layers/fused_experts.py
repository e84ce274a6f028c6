"""Experts of a mixture, in one op: each token runs through a few of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_hybrid.backends.select import select
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.formats.stored_weights import features_of, name_of
from torch_hybrid.ops.fused_experts.op import HAS_GATE, IMPLEMENTATIONS, fused_experts
from torch_hybrid.ops.fused_experts.op_expert_linear import expert_linear
from torch_hybrid.ops.fused_experts.reference import activate
from torch_hybrid.ranks import Ranks, divide


class FusedExperts(nn.Module):
    """E MLPs (experts), of which each token takes k.

    Args:
        gate_up_proj: [E, 2 I, dim], gate rows before up rows; [E, I, dim] without a gate.
        down_proj: [E, dim, I].
        activation: "silu" with a gate, or "relu2" without one.
        limit, softcaps: bounds of gate and up, as ``fused_experts`` takes them.
        impl: an implementation of ``fused_experts``, or "auto", which chooses one that can serve
            the weights as they are now. A runner chooses anew, by its ``Backends``.

    Attributes:
        choice: chosen implementation.
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
        """Replace the weights by quantized ones with scales.

        Args:
            gate_up_proj, down_proj, gate_up_scales, down_scales: as ``fused_experts`` takes them.
            dtype: dtype of the tokens.
        """
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        self.gate_up_scales, self.down_scales, self._dtype = gate_up_scales, down_scales, dtype
        self.choice = select(self.op, IMPLEMENTATIONS, self.need)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tokens."""
        return self._dtype or self.down_proj.dtype

    @property
    def need(self) -> Need:
        """Need of the weights, on the device where they are now."""
        features = features_of(self.down_proj.dtype)
        return Need(device=self.down_proj.device, dtype=self.dtype, features=features)

    @property
    def kind(self) -> str:
        """Name of the modules for which a runner makes one choice."""
        stored = self.down_proj.dtype
        return self.op if self.down_scales is None else f"{name_of(stored)} {self.op}"

    @in_own_dtype(1, lambda experts: experts.dtype)
    def forward(
        self,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        adapted_ids: Tensor | None = None,
    ) -> Tensor:
        """Run x [T, dim] through experts, by ids and weights [T, k] -> [T, dim].

        ``adapted_ids`` are left to hooks: of rows that adapters change.
        """
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

    @property
    def has_gate(self) -> bool:
        """Flag of an activation that multiplies up by a gate."""
        return HAS_GATE[self.activation]

    def product(self, place: int, rows: Tensor, expert_ids: Tensor) -> Tensor:
        """Multiply each row by one matrix of its expert.

        Args:
            place: 0 for gate, then up, then down; without a gate 0 for up.
            rows: [P, K] tokens, or hidden activations.
            expert_ids: [P] int32; the number of experts stands for none.

        Returns:
            [P, N]; 0 for a row without an expert.
        """
        num_experts, num_parts = len(self.down_proj), 1 + self.has_gate
        weight, scales = self.down_proj, self.down_scales
        if place < num_parts:
            weight = self.gate_up_proj.unflatten(1, (num_parts, -1)).flatten(0, 1)
            if self.gate_up_scales is not None:
                scales = self.gate_up_scales.unflatten(1, (num_parts, -1)).flatten(0, 1)
            expert_ids = (expert_ids * num_parts + place).clamp(max=num_experts * num_parts)
        # Rows of adapters are not rounded to FP8.
        impl = "triton" if self.choice.impl == "triton_fp8" else self.choice.impl
        return expert_linear(rows, expert_ids, weight, scales=scales, impl=impl)

    def hidden(self, projected: Tensor) -> Tensor:
        """Turn products with gate and up, [P, 2 I] or [P, I], into hidden activations [P, I]."""
        return activate(self, projected.float()).to(projected.dtype)

    def shard(self, ranks: Ranks) -> FusedExperts:
        """Make this rank's layer: a part of each expert's width; callers sum outputs over ranks.

        Raises:
            UnsupportedError: the ranks do not divide the width.
        """
        width = self.down_proj.shape[2]
        divide("the width of the experts", width, ranks.size)
        blocks = [(width, 1)] * (1 + self.has_gate)
        return FusedExperts(
            ranks.parameter(self.gate_up_proj, blocks, dim=1),
            ranks.parameter(self.down_proj, [(width, 1)], dim=2),
            activation=self.activation,
            limit=self.limit,
            softcaps=self.softcaps,
            impl=self.choice.impl,
        )
