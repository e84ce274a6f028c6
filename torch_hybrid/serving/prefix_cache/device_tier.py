"""Device tier: kept snapshots of a runner, and their eviction when it runs short.

    a slot     evict the snapshot of least worth: tokens that it saves, by the starts since its use
    pages      evict the least worth per own page, among snapshots that no other one extends

Evicted snapshots go to the host tier, within its bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_hybrid.errors import CapacityError
from torch_hybrid.serving.prefix_cache.host_tier import HostTier
from torch_hybrid.serving.prefix_cache.tree import Node

if TYPE_CHECKING:
    from torch_hybrid.caches.pool_copies import HostCopy
    from torch_hybrid.caches.snapshot import Snapshot
    from torch_hybrid.graphs.runner import Runner


class DeviceTier:
    """Kept snapshots of a runner; a ``caches.snapshot.Reclaimer``.

    Args:
        runner: the runner whose pools hold them.
        host_bytes: bytes of the host tier.
    """

    def __init__(self, runner: Runner, host_bytes: int) -> None:
        self._cache, self._page_size = runner.cache, runner.page_size
        costs = self._cache.costs()
        self._slot_bytes = sum(cost.per_sequence for cost in costs)
        self._page_bytes = runner.page_size * sum(cost.per_token for cost in costs)
        self._nodes: dict[Node, None] = {}  # in order of creation
        self.host = HostTier(host_bytes, self.worth)
        self.now = 0  # counts starts
        self.num_evictions = 0

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots on the device."""
        return len(self._nodes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the snapshots' states, and of pages that no sequence holds."""
        states = len(self._nodes) * self._slot_bytes
        return states + self._cache.pages.num_spare * self._page_bytes

    def keep(self, node: Node, snapshot: Snapshot) -> None:
        """Keep a snapshot at a node that has none."""
        node.keep(snapshot)
        self.host.drop(node)
        node.last_used = self.now
        self._nodes[node] = None
        self._note_kept()

    def drop(self, node: Node) -> None:
        """Release the snapshot at a node."""
        assert node.snapshot is not None
        self._cache.snapshots.release(node.snapshot)
        node.keep(None)
        node.maker = None
        del self._nodes[node]
        self._note_kept()

    def keep_on_host(self, node: Node, copy: HostCopy) -> bool:
        """Keep a copy from elsewhere at a node, if the host has room; tell whether it has."""
        has_room = self.host.make_room(copy.nbytes, self.worth(node))
        if has_room:
            self.host.keep(node, copy)
            self._note_kept()
        return has_room

    def bring_back(self, node: Node, copy: HostCopy) -> Snapshot | None:
        """Restore a snapshot from its host copy; None if the device has no room for it."""
        self.host.drop(node)
        try:
            snapshot = self._cache.snapshots.from_host(copy)
        except CapacityError:  # the user, or sequences that have not started, hold the slots
            self._note_kept()
            return None
        self.keep(node, snapshot)
        return snapshot

    def copies(self) -> list[tuple[list[int], HostCopy]]:
        """Copy all committed prefixes, on the device and on the host, with their tokens.

        Those of adapters are left out, which another process may have by other names.
        """
        copies = [
            (node.all_tokens, self._cache.snapshots.to_host(node.snapshot))
            for node in self._nodes
            if node.snapshot is not None and node.maker is None
        ]
        away = ((node.all_tokens, node.on_host) for node in self.host.nodes)
        copies += [(tokens, copy) for tokens, copy in away if copy is not None]
        return [(tokens, copy) for tokens, copy in copies if copy.adapter is None]

    def clear(self) -> None:
        """Release all snapshots, and drop all copies on the host."""
        for node in list(self._nodes):
            self.drop(node)
        self.host.clear()
        self._note_kept()

    def free_pages(self, count: int) -> None:
        """Evict snapshots until ``count`` pages are free, as a ``Reclaimer`` does.

        Only a snapshot that no other one extends frees pages. Those whose last page no sequence
        holds go first.
        """
        while self._nodes and self._cache.pages.num_free < count:
            last = [node for node in self._nodes if node.num_kept == 1]
            alone = [node for node in last if self._frees_a_page(node)]
            self._evict(min(alone or last, key=self._worth_of_a_page))

    def free_snapshot(self) -> None:
        """Evict snapshots until a slot is free, as a ``Reclaimer`` does."""
        while self._nodes and not self._cache.snapshots.num_free:
            self._evict(min(self._nodes, key=self.worth))

    def worth(self, node: Node) -> float:
        """Divide the tokens that a snapshot saves by the starts since it was last used."""
        return (node.depth - depth_before(node)) / (1 + self.now - node.last_used)

    def _note_kept(self) -> None:
        """Be among the reclaimers while anything is kept: also what new weights make stale."""
        reclaimers = self._cache.snapshots.reclaimers
        is_keeping = bool(self._nodes or self.host.num_bytes)
        if is_keeping and self not in reclaimers:
            reclaimers.append(self)
        elif not is_keeping and self in reclaimers:
            reclaimers.remove(self)

    def _worth_of_a_page(self, node: Node) -> float:
        """Divide a snapshot's worth by its pages that no earlier snapshot has."""
        size = self._page_size
        return self.worth(node) / (1 + node.depth // size - depth_before(node) // size)

    def _frees_a_page(self, node: Node) -> bool:
        assert node.snapshot is not None
        return self._cache.snapshots.is_last_page_spare(node.snapshot)

    def _evict(self, node: Node) -> None:
        """Release the snapshot at a node; a committed one may go to the host."""
        self.num_evictions += 1
        snapshot = node.snapshot
        assert snapshot is not None
        num_pages = -(-snapshot.num_tokens // self._page_size)
        num_bytes = self._slot_bytes + num_pages * self._page_bytes
        if node.maker is None and self.host.make_room(num_bytes, self.worth(node)):
            self.host.keep(node, self._cache.snapshots.to_host(snapshot))
        self.drop(node)


def depth_before(node: Node) -> int:
    """Return the depth of the nearest snapshot above a node; 0 if there is none."""
    before = (each.depth for each in node.path() if each is not node and each.snapshot)
    return next(before, 0)
