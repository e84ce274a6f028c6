"""A live sequence: its handle, and what it has in the pools."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sequence:
    """A handle of one sequence in a cache; stale once the sequence is freed.

    Where its states and pages lie is the cache's to say, and may change.
    """

    id: int
    owner: object = field(repr=False)  # of the cache that made it; kept alive by its handles
    _held: SequenceState = field(repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        """How many tokens it holds for certain: the one count of them that there is."""
        return self._held.length


@dataclass(slots=True)
class SequenceState:
    """What a live sequence has in the pools."""

    place: int  # among the sequences, from 1
    slot: int  # where its states go
    start: int  # where they are: its own slot, or that of a snapshot, from which it goes on
    pages: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0  # of what is certain
    num_drafts: int = 0  # tokens after those that are not
    num_accepted: int = 0  # of the last certain tokens, those that its states do not hold yet
    num_unread: int = 0  # of the last certain tokens, those that the model's head has not read
    has_borrowed: bool = False  # its last page, partly filled: it is copied before it is written
    shift: int = 0  # from the number of a token to its rotary position, after images
    is_broken: bool = False
