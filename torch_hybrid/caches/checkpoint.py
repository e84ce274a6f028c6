"""What is kept of a sequence at one of its tokens, for others to start from."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A handle of what a sequence held at one of its tokens; stale once it is released."""

    id: int
    num_tokens: int
    owner: object = field(repr=False)  # of the cache that made it; kept alive by its handles


@dataclass(slots=True)
class Kept:
    """What a live checkpoint has in the pools. Nobody writes its slot, nor its tokens in the pages:
    the places behind them, in the last page, are those of the sequence that it was made of."""

    slot: int | None  # of its states; None where the model has none
    pages: array[int]
    is_spare: bool  # given up when somebody asks for pages or slots


class Reclaimer(Protocol):
    """Who keeps checkpoints to spare, and releases them when something runs out."""

    def free_pages(self, count: int) -> None:
        """Release checkpoints until ``count`` pages are free, or none of them is left."""
        ...

    def clear(self) -> None:
        """Release all of them."""
        ...

    def free_checkpoint(self) -> None:
        """Release checkpoints until one more can be made, or none of them is left."""
        ...
