"""The base of linear mixers, and how parts that several of them have are initialised."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from torch_hybrid.backends.recurrent import RecurrentPlan
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.head_linear import HeadLinear
from torch_hybrid.ranks import Block, Ranks

Blocks = list[Block] | int


class Composed(nn.Module):
    """Base of modules that are dataclasses: their fields are the parts that they are made of."""

    def __new__(cls, *_parts: object, **_more: object) -> Self:
        """Make a module that takes parts and weights as attributes, before it has any."""
        made = super().__new__(cls)
        nn.Module.__init__(made)
        return made


class Divisible(Composed):
    """A layer that can be divided among ranks, each of which has some of its heads.

    Channels are divided where the layer has no heads.
    """

    def blocks(self) -> Mapping[str, Blocks]:
        """Say how the weights are divided, by name; every rank has the others whole.

        Weights with blocks are cut by rows (``Ranks.cut``). A number is that of the heads whose
        outputs a projection reads: it is cut by columns, and sums its products over ranks.
        """
        raise NotImplementedError

    def shard(self, ranks: Ranks) -> Self:
        """Make this rank's layer: it keeps what is its own in a cache, and sums outputs over ranks.

        Raises:
            UnsupportedError: the ranks do not divide the heads, or the channels.
        """
        whole: Any = self
        part = copy.copy(whole)
        for registry in ("_parameters", "_buffers", "_modules"):
            part.__dict__[registry] = self.__dict__[registry].copy()
        part.spec = whole.spec.divided(ranks.size)
        for name, blocks in self.blocks().items():
            setattr(part, name, _part(getattr(whole, name), blocks, ranks))
        made: Self = part
        return made


def _part(weight: Any, blocks: Blocks, ranks: Ranks) -> nn.Parameter | nn.Module | None:
    """Cut this rank's part out of a parameter or a projection; None stays None."""
    if isinstance(blocks, int):
        return ranks.summed_columns(weight, blocks)
    if isinstance(weight, HeadLinear):
        return weight.shard(ranks, blocks)
    if isinstance(weight, Tensor):
        return ranks.parameter(weight, blocks)
    return None if weight is None else ranks.rows(weight, blocks)


class Mixer(Divisible):
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
