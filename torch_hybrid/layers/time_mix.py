"""The time mixing of RWKV-4, as a module of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_hybrid.backends.recurrent import RecurrentPlan, run_rule
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.mixer import Mixer, parameter
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.layers.token_shift import TokenShift
from torch_hybrid.ops.wkv import wkv
from torch_hybrid.ranks import Ranks
from torch_hybrid.specs import TimeMixSpec


class TimeMix(Mixer):
    """Token shift, projections, weighted average of past values, gate, projection.

    Keys, values and receptances (the gate) are projections of one mix each, which the token shift
    makes.

    Args:
        spec: the mixer's facts.
    """

    def __init__(self, spec: TimeMixSpec) -> None:
        super().__init__()
        self.spec = spec
        dim, channels = spec.dim, spec.channels

        self.shift = TokenShift(dim, 3)
        self.key = nn.Linear(dim, channels, bias=False)
        self.value = nn.Linear(dim, channels, bias=False)
        self.receptance = nn.Linear(dim, channels, bias=False)
        self.out_proj = nn.Linear(channels, dim, bias=False)
        self.time_decay = parameter(channels)
        self.time_first = parameter(channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise about as the published models do: channels forget over 0.05 to 150 tokens."""
        with torch.no_grad():
            decay = self.time_decay
            spread = torch.linspace(-5.0, 3.0, len(decay), dtype=decay.dtype, device=decay.device)
            decay.copy_(spread)
            self.time_first.fill_(-1.2)

    @in_own_dtype(1, lambda mixer: mixer.shift.mixes.dtype)
    def forward(self, x: Tensor, plan: RecurrentPlan, cache: LayerCache) -> Tensor:
        for_key, for_value, for_receptance = self.shift(x, plan, cache)
        k, v = self.key(for_key), self.value(for_value)
        log_decay, bonus = -self.time_decay.float().exp(), self.time_first.float()
        mean = run_rule(wkv, (k, v), (log_decay, bonus, cache["state"]), plan, cache)
        out: Tensor = self.out_proj(self.receptance(for_receptance).sigmoid() * mean)
        return out

    def shard(self, ranks: Ranks) -> TimeMix:
        channels = [(self.spec.channels, 1)]
        with on_meta():
            part = TimeMix(self.spec.divided(ranks.size))
        part.shift = self.shift
        part.key = ranks.rows(self.key, channels)
        part.value = ranks.rows(self.value, channels)
        part.receptance = ranks.rows(self.receptance, channels)
        part.out_proj = ranks.summed_columns(self.out_proj, self.spec.channels)
        part.time_decay = ranks.parameter(self.time_decay, channels)
        part.time_first = ranks.parameter(self.time_first, channels)
        return part
