"""Linear layers with low-rank adapters (LoRA): one of several for each row, or none.

    sites    linear layers of a model, whose outputs adapters change
    pools    factors of all resident adapters, for each site; at fixed addresses
    given    slot of each row, and the pools: what a step hands to the hooks of the sites

A step with adapters has a hook at each site; a step without has none, and is as in a runner that
takes no adapters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.ops.lora.op import lora

# Of a part of a layer: a [r, inputs] and b [outputs of the part, r]; None: it has no adapter.
Factors = tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSite:
    """Linear layer that adapters may change.

    Attributes:
        path: of the module in the model, which maps [..., inputs] to [..., outputs].
        inputs: width of a row of inputs.
        widths: outputs of each part: adapters have factors of their own for each.
        dtype: of inputs and outputs.
    """

    path: str
    inputs: int
    widths: tuple[int, ...]
    dtype: torch.dtype


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

        def pool(site: AdapterSite) -> LayerCache:
            parts, outputs = len(site.widths), sum(site.widths)
            starts = [sum(site.widths[:i]) for i in range(parts + 1)]
            a = (max_adapters, parts, max_rank, site.inputs)
            b = (max_adapters, max_rank, outputs)
            return {
                "a": torch.zeros(a, dtype=site.dtype, device=device),
                "b": torch.zeros(b, dtype=site.dtype, device=device),
                "ranks": torch.zeros(max_adapters, parts, dtype=torch.int32, device=device),
                "starts": torch.tensor(starts, dtype=torch.int32, device=device),
            }

        self.pools: tuple[LayerCache, ...] = tuple(map(pool, sites))
        self._given: tuple[Tensor, Sequence[LayerCache]] | None = None

    @property
    def by_path(self) -> Mapping[str, LayerCache]:
        """Pools of each site, by its path in the model."""
        return {site.path: pool for site, pool in zip(self.sites, self.pools, strict=True)}

    def write(self, slot: int, factors: Sequence[Sequence[Factors]]) -> None:
        """Write an adapter into a slot, from 1: its factors of each part of each site."""
        with torch.inference_mode():
            for pool, parts in zip(self.pools, factors, strict=True):
                a, b = pool["a"][slot - 1], pool["b"][slot - 1]
                columns = b.split(pool["starts"].diff().tolist(), dim=1)
                ranks = [0 if part is None else part[0].shape[0] for part in parts]
                for place, (rank, part) in enumerate(zip(ranks, parts, strict=True)):
                    if part is not None:
                        a[place, :rank].copy_(part[0])
                        columns[place][:rank].copy_(part[1].T)
                pool["ranks"][slot - 1].copy_(torch.tensor(ranks, dtype=torch.int32, device="cpu"))

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
        """Have the sites of a model, or of a copy, add the rows' adapters to their outputs."""
        handles = [
            model.get_submodule(site.path).register_forward_hook(_Hook(self, place))
            for place, site in enumerate(self.sites)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def add(self, place: int, x: Tensor, out: Tensor) -> Tensor:
        """Add the rows' adapters to the outputs of a site for inputs x."""
        if self._given is None:
            return out
        slots, pools = self._given
        rows = x.reshape(-1, x.shape[-1])
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        pool = pools[place]
        added = lora(
            out.reshape(-1, out.shape[-1]),
            rows,
            pool["a"],
            pool["b"],
            pool["ranks"],
            pool["starts"],
            slots,
            impl=self.impl,
        )
        return added.view(out.shape)


@dataclass(frozen=True, slots=True)
class _Hook:
    """Forward hook of one site."""

    layers: AdaptedLayers
    place: int

    def __call__(self, _module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return self.layers.add(self.place, args[0], out)
