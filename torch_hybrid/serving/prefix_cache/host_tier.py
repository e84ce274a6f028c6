"""Host tier: copies of snapshots evicted from the device, within a number of bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch_hybrid.serving.prefix_cache.tree import Node

if TYPE_CHECKING:
    from torch_hybrid.caches.pool_copies import HostCopy


class HostTier:
    """Copies of snapshots on the host, at their nodes of the tree.

    Args:
        max_bytes: the most bytes of all copies together.
        worth: worth of the copy at a node; the least is evicted first.
    """

    def __init__(self, max_bytes: int, worth: Callable[[Node], float]) -> None:
        self._max_bytes, self._worth = max_bytes, worth
        self._nodes: dict[Node, None] = {}  # in order of arrival
        self.num_bytes = 0

    def make_room(self, num_bytes: int, worth: float) -> bool:
        """Evict copies of less worth until ``num_bytes`` fit; tell whether they do."""
        if num_bytes > self._max_bytes:
            return False
        while self.num_bytes + num_bytes > self._max_bytes:
            least = min(self._nodes, key=self._worth)
            if self._worth(least) >= worth:
                return False
            self.drop(least)
        return True

    def keep(self, node: Node, copy: HostCopy) -> None:
        """Keep a copy at a node that has none."""
        node.keep_on_host(copy)
        self._nodes[node] = None
        self.num_bytes += copy.nbytes

    def drop(self, node: Node) -> None:
        """Drop the copy at a node, if there is one."""
        if node.on_host is not None:
            self.num_bytes -= node.on_host.nbytes
            node.keep_on_host(None)
            del self._nodes[node]

    @property
    def nodes(self) -> list[Node]:
        """Nodes that have a copy."""
        return list(self._nodes)

    def clear(self) -> None:
        """Drop all copies."""
        for node in list(self._nodes):
            self.drop(node)
