"""Adapters of a runner: which are known, which are resident in its slots, and who may be evicted.

known       by name: the folder is kept, and read again if the adapter was evicted
resident    in a slot of the pools; sequences with an adapter keep it resident
evicted     the least recently used without sequences, when another one needs its slot; one that
            came from memory is not
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self
from weakref import WeakSet

import torch
from torch import nn

from torch_hybrid.backends.select import Backends, Choice, select
from torch_hybrid.caches.adapter import Adapter, check_loaded
from torch_hybrid.caches.hybrid import HybridCache
from torch_hybrid.errors import CapacityError, UnsupportedError
from torch_hybrid.graphs.options.options import Options
from torch_hybrid.graphs.step import AdaptableModel, Model
from torch_hybrid.layers.adapted import AdaptedLayers
from torch_hybrid.layers.adapter_sites import AdapterKinds, Factors
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.lora.op import IMPLEMENTATIONS

MOST_RANK = 256


class AdapterUser(Protocol):
    """Engine, whose unfinished requests keep their adapters resident."""

    def adapters_in_use(self) -> set[Adapter]: ...


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """Adapter that was read, from a folder if there is one, and the stamp of its files."""

    folder: Path | None
    stamp: tuple[int, ...]
    factors: Sequence[Sequence[Factors]]


@dataclass(eq=False)
class Adapters:
    """Adapters of a runner, by name; its caller holds the runner's lock."""

    model: AdaptableModel
    layers: AdaptedLayers  # pools of the resident adapters
    cache: HybridCache  # holds the sequences
    max_adapters: int  # number of slots
    max_rank: int  # largest rank
    kinds: AdapterKinds  # what adapters may change

    @classmethod
    def of(
        cls,
        model: Model,
        cache: HybridCache,
        *,
        max_adapters: int,
        max_rank: int,
        kinds: AdapterKinds,
    ) -> Self:
        """Make the pools of a runner.

        Raises:
            UnsupportedError: the model takes no adapters.
        """
        if not isinstance(model, AdaptableModel):
            raise UnsupportedError(f"max_adapters: {type(model).__name__} takes no adapters")
        sites = model.adapter_sites(kinds)
        layers = AdaptedLayers(sites, max_adapters, max_rank, device=model.device)
        return cls(
            model=model,
            layers=layers,
            cache=cache,
            max_adapters=max_adapters,
            max_rank=max_rank,
            kinds=kinds,
        )

    def choose(self, wanted: Backends) -> Choice:
        """Choose the implementation that adds adapters to the outputs of layers.

        Raises:
            UnsupportedError: none serves them.
        """
        needs = [
            Need(device=self.model.device, dtype=site.dtype, features=wanted.features)
            for site in self.layers.sites
        ]
        choice = select("lora", IMPLEMENTATIONS, needs, wanted.named("lora", "auto"))
        self.layers.impl = choice.impl
        return choice

    def __post_init__(self) -> None:
        self.users: WeakSet[AdapterUser] = WeakSet()  # who may keep adapters resident
        self._known: dict[str, Adapter] = {}
        self._num_loads = self._num_starts = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the known adapters."""
        return tuple(self._known)

    def find(self, name: str) -> Adapter:
        """Find a known adapter.

        Raises:
            ValueError: there is none of this name.
        """
        check_loaded(name, self._known)
        return self._known[name]

    def read(self, source: Path | nn.Module) -> ReadAdapter:
        """Read an adapter from a folder or a model; other threads may run steps meanwhile.

        Raises:
            ValueError, UnsupportedError: as ``Runner.load_adapter`` does.
        """
        folder = None if isinstance(source, nn.Module) else source
        stamp = () if folder is None else _stamp(folder)
        factors = self.model.read_adapter(source, self.max_rank, self.kinds)
        return ReadAdapter(folder, stamp, factors)

    def add(self, name: str, read: ReadAdapter) -> None:
        """Put an adapter that was read into a slot, under a new name.

        Raises:
            ValueError: the name is taken.
            CapacityError: all slots are in use.
        """
        if name in self._known:
            raise ValueError(f"an adapter {name!r} is loaded already: unload it first")
        made = Adapter(name=name, number=self._num_loads + 1, folder=read.folder, stamp=read.stamp)
        self._place(made, read, ())
        self._num_loads += 1
        self._known[name] = made

    def read_evicted(self, names: Collection[str]) -> dict[str, ReadAdapter]:
        """Read those adapters that are evicted now; other threads may run steps meanwhile."""
        found = ((name, self._known.get(name)) for name in names)
        return {
            name: self.read(adapter.folder)
            for name, adapter in found
            if adapter is not None and adapter.folder is not None and not adapter.slot
        }

    def resident(
        self, name: str, keep: Collection[Adapter] = (), read: ReadAdapter | None = None
    ) -> Adapter:
        """Find a known adapter, and put it into a slot if it was evicted: as it was read before,
        or is now.

        Raises:
            ValueError: there is none of this name, or its files have changed for the worse.
            CapacityError: all slots are in use.
        """
        adapter = self.find(name)
        if not adapter.slot:
            assert adapter.folder is not None  # others are not evicted
            if read is None or read.folder != adapter.folder:
                read = self.read(adapter.folder)
            if read.stamp != adapter.stamp:
                raise ValueError(
                    f"adapter {name!r} was evicted, and {adapter.folder} has changed since it was "
                    f"loaded: unload it and load it anew"
                )
            self._place(adapter, read, keep)
        self._num_starts += 1
        adapter.last_used = self._num_starts
        return adapter

    def unload(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            ValueError: there is none of this name, or it is in use.
        """
        adapter = self.find(name)
        if adapter in self._in_use():
            raise ValueError(f"adapter {name!r} is in use: end its sequences and requests first")
        del self._known[name]
        adapter.slot = 0

    def _in_use(self) -> set[Adapter]:
        """List the adapters of live sequences, and of users' requests."""
        return self.cache.adapters_in_use.union(*(user.adapters_in_use() for user in self.users))

    def _place(self, adapter: Adapter, read: ReadAdapter, keep: Collection[Adapter]) -> None:
        """Put an adapter into a slot, and evict another one if there is no free slot."""
        residents = [other for other in self._known.values() if other.slot]
        free = {*range(1, 1 + self.max_adapters)} - {other.slot for other in residents}
        evicted = None
        if not free:
            in_use = self._in_use().union(keep)
            idle = [other for other in residents if other not in in_use and other.folder]
            if not idle:
                raise CapacityError(
                    f"adapter {adapter.name!r} needs a slot, and all {self.max_adapters} are in "
                    f"use: the runner's max_adapters raises this"
                )
            evicted = min(idle, key=lambda other: other.last_used)
        slot = min(free) if evicted is None else evicted.slot
        if evicted is not None:
            evicted.slot = 0
        self.layers.write(slot, read.factors)
        adapter.slot = slot


def adapter_bytes(model: Model, max_adapters: int, max_rank: int, kinds: AdapterKinds) -> int:
    """Count the bytes of a runner's pools of adapters."""
    if not max_adapters or not isinstance(model, AdaptableModel):
        return 0
    nowhere = torch.device("meta")
    return sum(
        tensor.nbytes
        for site in model.adapter_sites(kinds)
        for tensor in site.pool(max_adapters, max_rank, nowhere).values()
    )


def kinds_of(options: Options) -> AdapterKinds:
    """Return what the adapters of a runner with these options may change."""
    return AdapterKinds(saved_modules=options.saved_modules, experts=options.expert_adapters)


def _stamp(folder: Path) -> tuple[int, ...]:
    """Return sizes and times of the last writes of a folder's files."""
    files = sorted(folder.glob("adapter_*")) if folder.is_dir() else []
    return tuple(x for file in files for x in (file.stat().st_size, file.stat().st_mtime_ns))


def check_adapters(max_adapters: int, max_lora_rank: int) -> None:
    """Raise ValueError unless there may be so many adapters of such a rank."""
    if max_adapters < 0:
        raise ValueError(f"max_adapters must not be negative, got {max_adapters}")
    if not 1 <= max_lora_rank <= MOST_RANK:
        raise ValueError(f"max_lora_rank must be within 1 and {MOST_RANK}, got {max_lora_rank}")
