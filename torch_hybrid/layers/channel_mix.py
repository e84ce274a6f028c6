"""The channel mixing of RWKV-4, as a module of its own."""

from __future__ import annotations

from torch import Tensor, nn

from torch_hybrid.backends.recurrent import RecurrentPlan
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.mixer import Mixer
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.layers.token_shift import TokenShift
from torch_hybrid.ranks import Ranks
from torch_hybrid.specs import ChannelMixSpec


class ChannelMix(Mixer):
    """Token shift, projection, squared ReLU, projection, gate.

    Units and receptances (the gate) are projections of one mix each, which the token shift makes.

    Args:
        spec: the mixer's facts.
    """

    def __init__(self, spec: ChannelMixSpec) -> None:
        super().__init__()
        self.spec = spec
        self.shift = TokenShift(spec.dim, 2)
        self.key = nn.Linear(spec.dim, spec.width, bias=False)
        self.receptance = nn.Linear(spec.dim, spec.dim, bias=False)
        self.value = nn.Linear(spec.width, spec.dim, bias=False)

    @in_own_dtype(1)
    def forward(self, x: Tensor, plan: RecurrentPlan, cache: LayerCache) -> Tensor:
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
