"""The turns of those who use a runner: one call at a time, and none inside another.

A callback, a hook of the model, a signal handler or a finalizer may call a runner, or an engine on
it, at any place of a call in progress on its thread. What that call has read must stay true:

    run     a call: waits for other threads, and is refused inside a call of its own thread
    soon    what gives back or queues: done at once, or at the end of the call in progress
    post    the same without waiting for another thread, which a finalizer must never do
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from threading import RLock
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from torch_hybrid.host.surroundings import isolated

ParamT = ParamSpec("ParamT")
ResultT = TypeVar("ResultT")


class Turn:
    """Lets one call at a time use a runner.

    ``lock`` may be held over several calls that belong together. What was posted and was cut off
    by Ctrl-C is done again: it must find out what is left to do.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self._call: str | None = None  # in progress, of the thread that holds the lock
        self._posted: deque[Callable[[], object]] = deque()

    def run(self, name: str, call: Callable[[], ResultT]) -> ResultT:
        """Run a call, and what was posted before its end, each in a ``isolated`` context.

        Raises:
            RuntimeError: a call of this thread is in progress.
        """
        try:
            with self.lock:
                self.check(name)
                try:  # no context manager of Python's: Ctrl-C finds gaps at its ends
                    self._call = name
                    self._settle()
                    with isolated():
                        return call()
                finally:
                    try:
                        self._settle()
                    finally:
                        self._call = None
        finally:
            self._settle_if_free()  # what another thread posted since

    def check(self, name: str) -> None:
        """Refuse a call inside another one of this thread.

        Raises:
            RuntimeError: one is in progress.
        """
        with self.lock:
            if self._call is not None:
                raise RuntimeError(
                    f"{name} was called inside {self._call} of the same runner, by a callback, a "
                    f"hook, a signal handler or a finalizer: there an engine can submit, cancel "
                    f"and tell its stats, and a runner free and release; call {name} afterwards"
                )

    def soon(self, action: Callable[[], object]) -> None:
        """Do something that no call may see halfway: now, or at the end of this thread's call."""
        with self.lock:
            self.post(action)

    def post(self, action: Callable[[], object]) -> None:
        """Do something now or, while any thread is in a call, at the end of that."""
        self._posted.append(action)
        self._settle_if_free()

    def _settle_if_free(self) -> None:
        while self._posted and self.lock.acquire(blocking=False):
            try:
                if self._call is not None:
                    return
                self.run("what was posted", _nothing)
            finally:
                self.lock.release()

    def _settle(self) -> None:
        """Do what was posted, in order; what Ctrl-C cuts off stays the first to be done."""
        while self._posted:
            try:
                with isolated():
                    self._posted[0]()
            except Exception:
                self._posted.popleft()
                raise
            self._posted.popleft()


class Within(Turn):
    """The turn of who is in a call already, and makes others as parts of it."""

    def run(self, name: str, call: Callable[[], ResultT]) -> ResultT:
        """Run a part of the call in progress."""
        return call()

    def post(self, action: Callable[[], object]) -> None:
        """Do a part of the call in progress."""
        action()


def _nothing() -> None:
    pass


class HasTurn(Protocol):
    """A runner, or an engine on one."""

    @property
    def turn(self) -> Turn: ...


UserT = TypeVar("UserT", bound=HasTurn)


def in_turn(
    method: Callable[Concatenate[UserT, ParamT], ResultT],
) -> Callable[Concatenate[UserT, ParamT], ResultT]:
    """Make each call of a method one that waits for its turn."""

    @wraps(method)
    def call(self: UserT, /, *args: ParamT.args, **options: ParamT.kwargs) -> ResultT:
        return self.turn.run(method.__qualname__, partial(method, self, *args, **options))

    return call
