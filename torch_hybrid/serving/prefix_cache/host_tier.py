"""What had to make room on the device, within a number of bytes of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch_hybrid.serving.prefix_cache.tree import Node

if TYPE_CHECKING:
    from torch_hybrid.caches.pool_copies import HostCopy


class HostTier:
    """Copies of snapshots on the host, at their places in the tree.

    Args:
        max_bytes: that they take together, at the most.
        worth: of the copy at a place; the least goes first.
    """

    def __init__(self, max_bytes: int, worth: Callable[[Node], float]) -> None:
        self._max_bytes, self._worth = max_bytes, worth
        self._nodes: dict[Node, None] = {}  # in the order in which they came
        self.num_bytes = 0

    def make_room(self, num_bytes: int, worth: float) -> bool:
        """Whether there is room for so many bytes, if need be that of what is worth less."""
        if num_bytes > self._max_bytes:
            return False
        while self.num_bytes + num_bytes > self._max_bytes:
            least = min(self._nodes, key=self._worth)
            if self._worth(least) >= worth:
                return False
            self.drop(least)
        return True

    def keep(self, node: Node, copy: HostCopy) -> None:
        """Keep a copy at a place that has none."""
        node.keep_on_host(copy)
        self._nodes[node] = None
        self.num_bytes += copy.nbytes

    def drop(self, node: Node) -> None:
        """Keep no copy at a place any more, if there was one."""
        if node.on_host is not None:
            self.num_bytes -= node.on_host.nbytes
            node.keep_on_host(None)
            del self._nodes[node]

    @property
    def nodes(self) -> list[Node]:
        """Where copies are."""
        return list(self._nodes)

    def clear(self) -> None:
        """Keep nothing."""
        for node in list(self._nodes):
            self.drop(node)
