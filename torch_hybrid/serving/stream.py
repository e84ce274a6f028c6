"""Stream of the outputs or events of one call of ``generate``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from torch_hybrid.host.frames import with_room
from torch_hybrid.serving.request import Request, TokenEvent

if TYPE_CHECKING:
    from torch_hybrid.graphs.turn import Turn

ItemT = TypeVar("ItemT")


class Stream(Iterator[ItemT], Generic[ItemT]):
    """Iterator over one call's requests: the first iteration queues them, each serves them.

    It is no generator: a generator could not be closed inside its own step, nor go on after a step
    was refused.

    Args:
        requests: the requests of the call.
        turn: the runner's turn.
        queue: queues the requests, all or none.
        step: runs a step of the engine.
        abandon: ends unfinished requests, and frees what they hold.
        pick: chooses what an event yields; None yields nothing.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        turn: Turn,
        queue: Callable[[], None],
        step: Callable[[], object],
        abandon: Callable[[Sequence[Request]], None],
        pick: Callable[[TokenEvent], ItemT | None],
    ) -> None:
        self._turn, self._queue, self._step, self._pick = turn, queue, step, pick
        self._abandon = partial(abandon, requests)
        self._inbox: deque[TokenEvent] = deque()
        self._left = set(requests)  # whose last event was not taken yet
        self._is_begun = self._is_closed = False
        for request in requests:
            request.on_event = self._inbox.append

    def __next__(self) -> ItemT:
        """Run steps until there is an item to yield.

        Raises:
            RuntimeError: inside a call of the same runner, where another step is needed.
        """
        item = with_room(self._next)
        if item is None:
            raise StopIteration
        return item

    def _next(self) -> ItemT | None:
        """Run steps until there is an item, or none is left."""
        while self._left and not self._is_closed:
            if not self._inbox:
                self._turn.check("the iteration of Engine.generate")  # may go on later
            item = self._next_item()
            if item is not None:
                return item
        self.close()
        return None

    def _next_item(self) -> ItemT | None:
        """Take an event, or run a step if there is none."""
        try:
            if not self._is_begun:
                self._is_begun = True
                self._queue()
            event = self._inbox.popleft() if self._inbox else None
            if event is None:
                self._step()
                return None
            if event.output is not None:
                self._left.discard(event.request)
            return self._pick(event)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel unfinished requests; inside a step, when it ends."""
        if self._is_begun and not self._is_closed:
            self._turn.soon(self._abandon)
        self._is_closed = True

    def __del__(self) -> None:
        """Close the stream safely on whichever thread collects it."""
        if self._is_begun and not self._is_closed:
            self._turn.post(self._abandon)
