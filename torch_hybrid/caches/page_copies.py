"""Copies of pages in the pools of every layer that has pages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from torch_hybrid.caches.pools import LayerCache
from torch_hybrid.host import int_tensor
from torch_hybrid.ops.capability import Need
from torch_hybrid.ops.state_copy import state_copy
from torch_hybrid.ops.state_copy.op import IMPLEMENTATIONS
from torch_hybrid.specs import LayerTable


class PageCopies:
    """Copies pages of a cache on its device.

    Args:
        table: the layers.
        pools: of the layers, by kind and dense index. Mutated by ``copy``.
        device: of the pools.
    """

    def __init__(
        self,
        table: LayerTable,
        pools: Mapping[str, Sequence[LayerCache]],
        device: torch.device,
    ) -> None:
        self._device = device
        self._pools: dict[int, list[Tensor]] = defaultdict(list)  # by the dimension of their pages
        for entry in table.entries:
            for name, pool in entry.spec.pools().items():
                if pool.per == "page":
                    tensor = pools[entry.kind][entry.index][name]
                    self._pools[min(pool.planes, 1)].append(tensor.view(torch.uint8))

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy each page ``src[i]`` to the page ``dst[i]``, which is no source and not repeated."""
        sources, targets = (
            int_tensor(list(ids), torch.int32).to(self._device, non_blocking=True)
            for ids in (src, dst)
        )
        with torch.inference_mode():
            for dim, pools in self._pools.items():
                state_copy(pools, sources, targets, dim=dim, impl=self._impl)

    @cached_property
    def _impl(self) -> str:
        """The first implementation that serves the device."""
        need = Need(device=self._device, dtype=torch.uint8)
        able = (name for name, each in IMPLEMENTATIONS.items() if not each.capability.why_not(need))
        return next(able)
