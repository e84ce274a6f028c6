"""Snapshots: states and pages of a sequence at one of its tokens, for others to start from."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch_hybrid.caches.adapter import Adapter
from torch_hybrid.caches.allocator import Allocator
from torch_hybrid.caches.pool_copies import HostCopy, PoolCopies
from torch_hybrid.errors import CapacityError


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Handle of a snapshot, stale once it is released."""

    id: int
    num_tokens: int
    owner: object = field(repr=False)  # identity of the cache, kept alive by its handles


@dataclass(slots=True)
class SnapshotState:
    """A live snapshot's slot and pages in the pools.

    Nobody writes its slot, nor its tokens in the pages. The places after them, in the last page,
    belong to the sequence that it was made of.
    """

    slot: int | None  # of its states; None for a model without states
    pages: array[int]
    is_spare: bool  # released by its reclaimer when pages or slots run short
    adapter: Adapter | None = None  # of the sequence that it was made of


class Reclaimer(Protocol):
    """Holder of spare snapshots, which it releases when the pools run short."""

    def free_pages(self, count: int) -> None:
        """Release snapshots until ``count`` pages are free, or no snapshot is left."""
        ...

    def clear(self) -> None:
        """Release all snapshots that it holds, and drop its copies of others."""
        ...

    def free_snapshot(self) -> None:
        """Release snapshots until one more can be made, or no snapshot is left."""
        ...


@dataclass(eq=False)
class Snapshots:
    """The live snapshots of a cache, and their slots and pages in the pools.

    ``reclaimers`` hold spare snapshots, and are asked for them in turn.
    """

    slots: Allocator  # allocator of sequences
    # allocator of state slots, those of sequences included; None for a model without states
    states: Allocator | None
    pages: Allocator  # allocator of pages
    page_size: int  # tokens in a page
    copies: PoolCopies  # copies between the pools and the host
    capacity: int  # number of state slots for snapshots
    ids: Iterator[int]  # ids of snapshots to come
    owner: object  # identity of the cache

    def __post_init__(self) -> None:
        self._kept: dict[int, SnapshotState] = {}  # by the id of a live snapshot
        self.reclaimers: list[Reclaimer] = []

    @property
    def num_free(self) -> int:
        """Number of snapshots that can still be made.

        A released slot counts as taken until sequences that start from it have written their own
        state. A model without states needs no slot: its pages are the limit.
        """
        if self.states is None:
            return self.pages.num_free + self.pages.num_spare
        return self.states.num_free - self.slots.num_free

    @property
    def num_firm(self) -> int:
        """Number of snapshots that are not spare."""
        return sum(not kept.is_spare for kept in self._kept.values())

    def add(
        self,
        num_tokens: int,
        slot: int | None,
        pages: array[int],
        *,
        spare: bool,
        adapter: Adapter | None,
    ) -> Snapshot:
        """Register a snapshot of ``num_tokens`` tokens, whose slot and pages are held already."""
        made = Snapshot(next(self.ids), num_tokens, self.owner)
        self._kept[made.id] = SnapshotState(slot=slot, pages=pages, is_spare=spare, adapter=adapter)
        return made

    def find(self, snapshot: Snapshot, length: int | None = None) -> SnapshotState:
        """Find the slot and pages of a snapshot.

        Raises:
            TypeError: it is no snapshot.
            ValueError: the snapshot is foreign or was released, or cannot be cut to ``length``
                tokens.
        """
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"expected what Runner.snapshot returned, got {snapshot!r}")
        if snapshot.owner is not self.owner or snapshot.id not in self._kept:
            is_ours = snapshot.owner is self.owner
            what = "was released" if is_ours else "belongs to another runner"
            raise ValueError(f"{snapshot} {what}")
        last = snapshot.num_tokens
        if length is not None and not 1 <= length <= last:
            raise ValueError(f"length must be within 1 and {last}, got {length}")
        if length not in (None, last) and self.states is not None:
            raise ValueError(f"a model with states starts at all {last} tokens, got {length}")
        return self._kept[snapshot.id]

    def holds(self, snapshot: Snapshot) -> bool:
        """Tell whether a handle is ours and was not released."""
        return snapshot.owner is self.owner and snapshot.id in self._kept

    def release(self, snapshot: Snapshot) -> None:
        """Release a snapshot; sequences that started from it stay as they are.

        Raises:
            ValueError: the handle is foreign or was released before.
        """
        kept = self.find(snapshot)
        del self._kept[snapshot.id]
        self.pages.give_back(kept.pages, spare=kept.is_spare)
        if self.states is not None and kept.slot is not None:
            self.states.give_back([kept.slot])

    def to_host(self, snapshot: Snapshot) -> HostCopy:
        """Copy a snapshot to host memory; the snapshot stays as it is.

        Raises:
            ValueError: the handle is foreign or was released.
        """
        kept = self.find(snapshot)
        copy = self.copies.to_host(kept.slot, kept.pages, snapshot.num_tokens)
        return replace(copy, adapter=kept.adapter)

    def from_host(self, copy: HostCopy) -> Snapshot:
        """Restore a spare snapshot from the host copy of one of this cache.

        Raises:
            CapacityError: there is no slot for its states, or fewer pages are free than it needs.
        """
        count = -(-copy.num_tokens // self.page_size)
        if self.states is not None:
            self.free_one()
        self.free_pages(count)
        pages = self.pages.take(count)
        slot = None if self.states is None else self.states.take(1)[0]
        self.copies.from_host(copy, slot, pages)
        self.pages.share(pages, spare=True)
        self.pages.give_back(pages)
        return self.add(copy.num_tokens, slot, pages, spare=True, adapter=copy.adapter)

    def num_shared_pages(self, start: Snapshot, length: int) -> int:
        """Count the pages that starting after ``length`` tokens of a snapshot saves.

        Pages that are spare now do not count, since the sequence then holds them firmly. A partly
        filled last page does not count either, since it is copied.
        """
        size = self.page_size
        pages = self.find(start).pages[: -(-length // size)]
        return length // size - self.pages.count_spare(pages)

    def is_last_page_spare(self, snapshot: Snapshot) -> bool:
        """Tell whether nobody holds the last page of a snapshot firmly."""
        return self.pages.count_spare(self.find(snapshot).pages[-1:]) == 1

    def free_one(self) -> None:
        """Free a slot for one more snapshot, from reclaimers if necessary.

        Raises:
            CapacityError: there is none.
        """
        for reclaimer in list(self.reclaimers):
            if not self.num_free:
                reclaimer.free_snapshot()
        if not self.num_free:
            raise CapacityError(
                f"asked for a snapshot, 0 of {self.capacity} are free: release some "
                f"or raise max_snapshots"
            )

    def free_pages(self, count: int) -> None:
        """Have reclaimers release snapshots until ``count`` pages are free, if enough are spare."""
        if count > self.pages.num_free + self.pages.num_spare:
            return
        for reclaimer in list(self.reclaimers):
            if count > self.pages.num_free:
                reclaimer.free_pages(count)
