"""Worker: a thread that makes masks, and that a step need not wait for without end.

No limit of llguidance ends some intersections of patterns. A thread cannot be ended either, so one
that is late is left behind, and another takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from llguidance import LLExecutor

    Task = Callable[[LLExecutor], object]

MAX_SECONDS = 2.0


class Shared(Protocol):
    """Exchange of masks among ranks: one makes them, for a limit of time must hold for all."""

    @property
    def makes(self) -> bool:
        """True on the rank that makes masks."""
        ...

    def send(self, masks: Tensor, errors: list[str | None]) -> list[str | None]:
        """Send the masks [T, W] of a step, or write those that came; return the errors."""
        ...


class Worker:
    """Thread that runs one task after another; the program may exit while it runs.

    Attributes:
        shared: where ranks share an engine, the exchange of its masks.
    """

    def __init__(self) -> None:
        self.shared: Shared | None = None
        self._tasks: SimpleQueue[tuple[Task, Event]] | None = None

    def finishes(self, task: Task) -> bool:
        """Run a task that does not raise, and tell whether it was done in ``MAX_SECONDS``.

        Args:
            task: called with the threads that share a step's masks.
        """
        if self._tasks is None:
            self._tasks = SimpleQueue()
            Thread(target=_run, args=(self._tasks,), daemon=True).start()
        done = Event()
        self._tasks.put((task, done))
        if done.wait(MAX_SECONDS):
            return True
        self._tasks = None
        return False


def _run(tasks: SimpleQueue[tuple[Task, Event]]) -> None:
    from llguidance import LLExecutor

    executor = LLExecutor()
    while True:
        task, done = tasks.get()
        task(executor)
        done.set()
