"""Layers with low-rank adapters (LoRA): one of several for each row, or none.

    sites    layers of a model, whose outputs adapters change
    pools    factors of all resident adapters, for each site; at fixed addresses
    given    slot of each row, and the pools: what a step hands to the hooks of the sites

A step with adapters has a hook at each site; a step without has none, and is as in a runner that
takes no adapters.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.layers.adapter_sites import AdapterSite, Factors, Ran


class AdaptedLayers:
    """The sites of a model, and the factors of a runner's resident adapters.

    Args:
        sites: of the model.
        max_adapters: number of slots.
        max_rank: largest rank of an adapter's factors.
        device: of the pools.

    Attributes:
        impl: implementation of ``lora``.
    """

    @torch.inference_mode(mode=False)
    def __init__(
        self,
        sites: Sequence[AdapterSite],
        max_adapters: int,
        max_rank: int,
        *,
        device: torch.device,
    ) -> None:
        self.sites, self.impl = sites, "torch"
        self.pools: tuple[LayerCache, ...] = tuple(
            site.pool(max_adapters, max_rank, device) for site in sites
        )
        self._given: tuple[Tensor, Sequence[LayerCache]] | None = None

    @property
    def by_path(self) -> Mapping[str, LayerCache]:
        """Pools of each site, by each of its paths in the model."""
        pairs = zip(self.sites, self.pools, strict=True)
        return {path: pool for site, pool in pairs for path in site.paths}

    def write(self, slot: int, factors: Sequence[Sequence[Factors]]) -> None:
        """Write an adapter into a slot, from 1: its factors of each part of each site."""
        with torch.inference_mode():
            for site, pool, parts in zip(self.sites, self.pools, factors, strict=True):
                site.write(pool, slot - 1, parts)

    def for_steps(self) -> AdaptedLayers:
        """Copy the layers, with the same pools, for steps that another thread may trace meanwhile:
        each copy is given its own slots."""
        return copy.copy(self)

    def give(self, slots: Tensor | None, pools: Sequence[LayerCache] = ()) -> None:
        """Give the hooks the slot of each row that comes; None: they change nothing.

        Args:
            slots: [T] int32, from 1; 0 for a row without adapter.
            pools: the pools, as the step is given them.
        """
        self._given = None if slots is None else (slots, pools)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Have the sites of a model, or of a copy, add the rows' adapters to their outputs.

        Meanwhile a module that layers share is another one in each, of the same weights.
        """
        with ExitStack() as undo:
            homes: dict[nn.Module, str] = {}
            for place, site in enumerate(self.sites):
                for path in site.paths:
                    module = _own_module(model, path, homes, undo)
                    hook = _Hook(self, place, _copied(module))
                    undo.callback(site.attach(module, hook))
            yield

    def before(self, place: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Change the inputs of a site's module, where adapters compute part of the outputs."""
        if self._given is None:
            return None
        slots, pools = self._given
        return self.sites[place].before(pools[place], slots, inputs)

    def add(self, place: int, module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """Add the rows' adapters to the outputs of a site for its inputs."""
        if self._given is None:
            return out
        slots, pools = self._given
        return self.sites[place].add(pools[place], Ran(module, inputs, out, slots, self.impl))


@dataclass(frozen=True, slots=True)
class _Hook:
    """Forward hook of one site, and the one before it, with its module without hooks."""

    layers: AdaptedLayers
    place: int
    module: nn.Module

    def __call__(self, _module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return self.layers.add(self.place, self.module, args, out)

    def before(self, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        return self.layers.before(self.place, args)


def _own_module(
    model: nn.Module, path: str, homes: dict[nn.Module, str], undo: ExitStack
) -> nn.Module:
    """Find the module of a path; what has a home at another path is copied for this one."""
    module, home = model, ""
    for name in path.split("."):
        holder, home = module, f"{home}.{name}"
        module = holder.get_submodule(name)
        if homes.setdefault(module, home) != home:
            undo.callback(setattr, holder, name, module)
            module = _copied(module)
            setattr(holder, name, module)
            homes[module] = home
    return module


def _copied(module: nn.Module) -> nn.Module:
    """Copy a module without its hooks; weights and children are the same."""
    made = copy.copy(module)
    made._modules = made._modules.copy()
    made._forward_hooks, made._forward_pre_hooks = OrderedDict(), OrderedDict()
    return made
