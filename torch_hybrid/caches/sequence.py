"""A live sequence: its handle, and its slots and pages in the pools."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from torch_hybrid.caches.adapter import Adapter


@dataclass(frozen=True, slots=True)
class Sequence:
    """Handle of one sequence in a cache, stale once the sequence is freed.

    The cache alone knows its slot and pages, which may change.
    """

    id: int
    owner: object = field(repr=False)  # identity of the cache, kept alive by its handles
    _held: SequenceState = field(repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        """Number of committed tokens; no other count of them exists."""
        return self._held.length


@dataclass(slots=True)
class SequenceState:
    """A live sequence's slots, pages and counts of tokens."""

    place: int  # number among the live sequences, from 1
    slot: int  # its own: steps write its states here
    start: int  # the next step reads its states here: its own slot, or a snapshot's
    pages: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0  # committed tokens
    num_drafts: int = 0  # tokens after those, not committed
    num_accepted: int = 0  # last committed tokens that its states do not hold yet
    num_unread: int = 0  # last committed tokens that the model's head has not read
    has_borrowed: bool = False  # its partly filled last page is a snapshot's: copied on write
    shift: int = 0  # of rotary positions against token indices, after images
    is_broken: bool = False
    adapter: Adapter | None = None  # of all its tokens
