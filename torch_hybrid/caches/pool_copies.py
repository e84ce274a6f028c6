"""Copies in the pools of every layer: of pages, and of snapshots to the host and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from torch_hybrid.caches.adapter import Adapter
from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.host.ints import int_tensor
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.state_copy import state_copy
from torch_hybrid.ops.state_copy.op import IMPLEMENTATIONS
from torch_hybrid.specs import LayerTable


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """Copy of a snapshot in host memory."""

    num_tokens: int
    states: tuple[Tensor, ...]
    pages: tuple[Tensor, ...]
    copied: torch.cuda.Event | None  # of a GPU: the copy is complete after it
    adapter: Adapter | None = None  # of the snapshot

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return sum(tensor.nbytes for tensor in (*self.states, *self.pages))


class PoolCopies:
    """Copies within the pools of a cache, and between them and the host.

    On a GPU, copies are ordered after all work started there, and nobody waits for them.

    Args:
        table: the layers.
        pools: pools of the layers, by kind and dense index. Mutated.
        device: device of the pools.
    """

    def __init__(
        self,
        table: LayerTable,
        pools: Mapping[str, Sequence[LayerCache]],
        device: torch.device,
    ) -> None:
        self._device = device
        self._states: list[Tensor] = []
        self._pages: dict[int, list[Tensor]] = defaultdict(list)  # by the dimension of pages
        for entry in table.entries:
            tensors = pools[entry.kind][entry.index]
            for name, pool in entry.spec.pools().items():
                if pool.per == "slot" or (pool.per == "open" and name in tensors):
                    self._states.append(tensors[name])
                elif pool.per == "page":
                    self._pages[min(pool.planes, 1)].append(tensors[name].view(torch.uint8))

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy each page ``src[i]`` to the page ``dst[i]``, which is no source and not repeated."""
        sources, targets = self._indices(src), self._indices(dst)
        with torch.inference_mode():
            for dim, pools in self._pages.items():
                state_copy(pools, sources, targets, dim=dim, impl=self._impl)

    def to_host(self, slot: int | None, pages: Sequence[int], num_tokens: int) -> HostCopy:
        """Copy pages, and a slot if there is one, to the host."""
        chosen = self._indices(pages)
        states = () if slot is None else tuple(self._on_host(pool[slot]) for pool in self._states)
        kept = tuple(
            self._on_host(pool.index_select(dim, chosen)) for dim, pool in self._paged_pools()
        )
        copied = None
        if self._device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self._device))
        return HostCopy(num_tokens=num_tokens, states=states, pages=kept, copied=copied)

    def from_host(self, copy: HostCopy, slot: int | None, pages: Sequence[int]) -> None:
        """Write a host copy to another slot and to as many other pages."""
        if copy.copied is not None:
            copy.copied.wait(torch.cuda.current_stream(self._device))
        chosen = self._indices(pages).long()
        with torch.inference_mode():
            if slot is not None:
                for pool, state in zip(self._states, copy.states, strict=True):
                    pool[slot].copy_(state, non_blocking=True)
            for (dim, pool), kept in zip(self._paged_pools(), copy.pages, strict=True):
                pool.index_copy_(dim, chosen, kept.to(self._device, non_blocking=True))

    def _paged_pools(self) -> Iterator[tuple[int, Tensor]]:
        for dim, pools in self._pages.items():
            for pool in pools:
                yield dim, pool

    def _on_host(self, tensor: Tensor) -> Tensor:
        is_pinned = self._device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_pinned)
        return host.copy_(tensor, non_blocking=True)

    def _indices(self, ids: Sequence[int]) -> Tensor:
        return int_tensor(list(ids), torch.int32).to(self._device, non_blocking=True)

    @cached_property
    def _impl(self) -> str:
        """First implementation that serves the device."""
        need = Need(device=self._device, dtype=torch.uint8)
        able = (name for name, each in IMPLEMENTATIONS.items() if not each.capability.why_not(need))
        return next(able)
