"""The mixers of RWKV-4, of tokens and of channels, each a module of its own."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from torch_hybrid.backends.recurrent import RecurrentPlan, convolve, run_rule
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.layers.mixer import Blocks, Mixer, empty_parameter
from torch_hybrid.layers.own_dtype import in_own_dtype
from torch_hybrid.ops.wkv import wkv
from torch_hybrid.specs.linear_recurrences import TOKEN_SHIFT, ChannelMixSpec, TimeMixSpec


class TokenShift(nn.Module):
    """Token shift: ``mix x[t] + (1 - mix) x[t - 1]`` of each channel, for several mixes.

    A convolution with one tap finds the token before, and keeps the last input.

    Args:
        dim: number of channels.
        num_mixes: number of mixes.
        dtype, device: dtype and device of the parameters.
    """

    taps: Tensor

    def __init__(
        self,
        dim: int,
        num_mixes: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        mixes = torch.empty(num_mixes, dim, dtype=dtype, device=device)
        self.mixes = nn.Parameter(mixes)
        self.register_buffer("taps", _taps_before(self.mixes), persistent=False)
        nn.init.uniform_(self.mixes)

    @classmethod
    def of(cls, mixes: Tensor) -> TokenShift:
        """Make a token shift with mixes [n, dim], which may be weights that are not read yet."""
        with on_meta():
            shift = cls(mixes.shape[1], mixes.shape[0])
        shift.mixes = nn.Parameter(mixes, requires_grad=False)
        shift.taps = _taps_before(mixes)
        return shift

    def forward(self, x: Tensor, plan: RecurrentPlan, cache: LayerCache) -> list[Tensor]:
        """Mix x [T, dim] -> [T, dim] for each mix; advance the last input in ``cache``."""
        before = convolve(x, self.taps, None, plan, cache, activation="none")
        return [x * mix + before * (1 - mix) for mix in self.mixes.unbind()]


def _taps_before(mixes: Tensor) -> Tensor:
    """Make taps [dim, 2] that select the token before, and not the token itself."""
    taps = torch.eye(TOKEN_SHIFT, dtype=mixes.dtype, device=mixes.device)[:1]
    return taps.repeat(mixes.shape[1], 1)


class TimeMix(Mixer):
    """Token shift, projections, weighted average of past values, gate, projection.

    Keys, values and receptances (the gate) are projections of one mix each, which the token shift
    makes.

    Args:
        spec: the mixer's facts.
        dtype, device: dtype and device of the parameters.
    """

    def __init__(
        self,
        spec: TimeMixSpec,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        parameter = partial(empty_parameter, dtype=dtype, device=device)
        self.spec = spec
        dim, channels = spec.dim, spec.channels

        self.shift = TokenShift(dim, 3, dtype=dtype, device=device)
        self.key = nn.Linear(dim, channels, bias=False, dtype=dtype, device=device)
        self.value = nn.Linear(dim, channels, bias=False, dtype=dtype, device=device)
        self.receptance = nn.Linear(dim, channels, bias=False, dtype=dtype, device=device)
        self.out_proj = nn.Linear(channels, dim, bias=False, dtype=dtype, device=device)
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

    def blocks(self) -> dict[str, Blocks]:
        channels: Blocks = [(self.spec.channels, 1)]
        names = ("key", "value", "receptance", "time_decay", "time_first")
        return {**dict.fromkeys(names, channels), "out_proj": self.spec.channels}


class ChannelMix(Mixer):
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
        self.shift = TokenShift(spec.dim, 2, dtype=dtype, device=device)
        self.key = nn.Linear(spec.dim, spec.width, bias=False, dtype=dtype, device=device)
        self.receptance = nn.Linear(spec.dim, spec.dim, bias=False, dtype=dtype, device=device)
        self.value = nn.Linear(spec.width, spec.dim, bias=False, dtype=dtype, device=device)

    @in_own_dtype(1)
    def forward(self, x: Tensor, plan: RecurrentPlan, cache: LayerCache) -> Tensor:
        for_key, for_receptance = self.shift(x, plan, cache)
        units = self.key(for_key).relu().square()
        out: Tensor = self.receptance(for_receptance).sigmoid() * self.value(units)
        return out

    def blocks(self) -> dict[str, Blocks]:
        """Divide the units; each rank has all receptances, which gate the sum over the ranks."""
        return {"key": [(self.spec.width, 1)], "value": self.spec.width}
