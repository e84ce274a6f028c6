"""The channel mixing of RWKV-4, as a module of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_hybrid.backends.recurrent import RecurrentPlan
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.layers.token_shift import TokenShift
from torch_hybrid.ranks import Ranks
from torch_hybrid.specs import ChannelMixSpec


class ChannelMix(nn.Module):
    """Token shift, projection, squared ReLU, projection, gate.

    Units and receptances (the gate) are projections of one mix each, which the token shift makes.

    Args:
        spec: the mixer's facts.
        dtype, device: dtype and device of the parameters.
    """

    def __init__(
        self,
        spec: ChannelMixSpec,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device)

        self.shift = TokenShift(spec.dim, 2, dtype=dtype, device=device)
        self.key = linear(spec.dim, spec.width)
        self.receptance = linear(spec.dim, spec.dim)
        self.value = linear(spec.width, spec.dim)

    @in_own_dtype(1)
    def forward(self, x: Tensor, plan: RecurrentPlan, cache: LayerCache) -> Tensor:
        """Mix the tokens of a step.

        Args:
            x: [T, dim], the sequences packed as ``plan`` says.
            plan: from the backend's ``plan``.
            cache: this layer's pools. Mutated at the slots that the plan names.

        Returns:
            [T, dim].
        """
        for_key, for_receptance = self.shift(x, plan, cache)
        units = self.key(for_key).relu().square()
        out: Tensor = self.receptance(for_receptance).sigmoid() * self.value(units)
        return out

    def shard(self, ranks: Ranks) -> ChannelMix:
        """Make this rank's layer: its part of the units, and all receptances.

        The receptances gate the sum over the ranks.

        Raises:
            UnsupportedError: the ranks do not divide the units.
        """
        with on_meta():
            part = ChannelMix(self.spec.divided(ranks.size))
        part.shift, part.receptance = self.shift, self.receptance
        part.key = ranks.rows(self.key, [(self.spec.width, 1)])
        part.value = ranks.summed_columns(self.value, self.spec.width)
        return part
