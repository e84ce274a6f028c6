"""The base of linear mixers, and how parts that several of them have are initialised."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_hybrid.backends.recurrent import RecurrentPlan
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.ranks import Ranks


class Mixer(nn.Module):
    """A mixer of a step's tokens whose states are in pools, by slot."""

    def forward(self, x: Tensor, plan: RecurrentPlan, cache: LayerCache) -> Tensor:
        """Mix the tokens of a step.

        Args:
            x: [T, dim], the sequences packed as ``plan`` says.
            plan: from the backend's ``plan``.
            cache: this layer's pools. Mutated at the slots that the plan names.

        Returns:
            [T, dim].
        """
        raise NotImplementedError

    def shard(self, ranks: Ranks) -> Mixer:
        """Make this rank's layer: it keeps the states of its heads, and sums outputs over ranks.

        Channels are divided where the mixer has no heads.

        Raises:
            UnsupportedError: the ranks do not divide the heads, or the channels.
        """
        raise NotImplementedError


def empty_parameter(
    *shape: int, dtype: torch.dtype | None, device: torch.device | None
) -> nn.Parameter:
    """Make a parameter that is initialised later."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


def init_convolution(weight: Tensor, bias: Tensor | None = None) -> None:
    """Initialise taps [C, W] and biases [C] as torch does."""
    bound = weight.shape[1] ** -0.5
    for each in (weight,) if bias is None else (weight, bias):
        nn.init.uniform_(each, -bound, bound)


def init_decays(A_log: Tensor, dt_bias: Tensor) -> None:
    """Initialise decays as published models do: time constants of 1 to 1000 tokens."""
    with torch.no_grad():
        A_log.uniform_(1, 16).log_()
    nn.init.uniform_(dt_bias, -7.0, -2.0)
