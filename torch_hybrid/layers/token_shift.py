"""RWKV's token shift: inputs mixed with those of the token before."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_hybrid.backends.recurrent import RecurrentPlan, convolve
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.host.defaults import on_meta
from torch_hybrid.specs.rwkv import TOKEN_SHIFT


class TokenShift(nn.Module):
    """Token shift: ``mix x[t] + (1 - mix) x[t - 1]`` of each channel, for several mixes.

    A convolution with one tap finds the token before, and keeps the last input.

    Args:
        dim: number of channels.
        num_mixes: number of mixes.
    """

    taps: Tensor

    def __init__(self, dim: int, num_mixes: int) -> None:
        super().__init__()
        mixes = torch.empty(num_mixes, dim)
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
