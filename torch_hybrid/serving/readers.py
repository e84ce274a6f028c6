"""Readers of a submitted request's events, registered before its first event."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch_hybrid.serving.request import TokenEvent

if TYPE_CHECKING:
    import asyncio

OnEvent = Callable[[TokenEvent], object]


def reader_of(on_event: OnEvent | None, queue: asyncio.Queue[TokenEvent] | None) -> OnEvent | None:
    """Make the only reader of a request's events; see ``Engine.submit``.

    Args:
        on_event: a function, called by the thread that steps.
        queue: filled by the event loop that runs here; the thread that steps notifies it.

    Raises:
        TypeError: one of them is of another kind.
        ValueError: both are given, the queue is bounded, or no event loop runs here.
    """
    if queue is not None:
        if on_event is not None:
            raise ValueError("events have one reader, got on_event and queue")
        return _into(queue)
    if on_event is not None and not callable(on_event):
        raise TypeError(f"on_event must be a callable or None, got {on_event!r}")
    return on_event


def _into(queue: asyncio.Queue[TokenEvent]) -> OnEvent:
    """Make a function that any thread may call to put an event into a queue of this thread."""
    import asyncio  # deferred: most programs do not need it

    if not isinstance(queue, asyncio.Queue):
        raise TypeError(f"queue must be an asyncio.Queue or None, got {queue!r}")
    if queue.maxsize > 0:
        raise ValueError(f"queue must be unbounded, got maxsize={queue.maxsize}")
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise ValueError(
            "queue is filled by the event loop that runs where submit is called, and none does; "
            "elsewhere: on_event=functools.partial(loop.call_soon_threadsafe, queue.put_nowait)"
        ) from None
    return lambda event: loop.call_soon_threadsafe(queue.put_nowait, event)
