"""Turns of the users of a runner: one call at a time, and none inside another.

A call of a runner, or of an engine on it, may come at any place of a call in progress on its
thread. It may come from a callback, a hook of the model, a signal handler or a finalizer. Values
that the outer call has read must stay true:

    run     a call: waits for other threads, and is refused inside a call of its own thread
    soon    an action that gives back or queues: done at once, or at the end of the call in progress
    post    like soon, without waiting for another thread, which a finalizer must never do
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from threading import RLock
from typing import Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

from torch_hybrid.host.surroundings import isolated

ParamT = ParamSpec("ParamT")
ResultT = TypeVar("ResultT")


class Turn:
    """Turns of the users of one runner: one call at a time runs.

    ``lock`` may be held over several calls that belong together. A posted action that Ctrl-C cut
    off is done again: it must find out what is left to do.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self._call: str | None = None  # call in progress, on the thread that holds the lock
        self._posted: deque[Callable[[], object]] = deque()

    def __reduce__(self) -> str:
        """Refuse to copy or pickle a runner, or an engine on it, of which a turn is a part.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a runner, or an engine on one, holds pools and locks of its process and cannot be "
            "copied or pickled: copy or pickle its model, and make another runner of that"
        )

    def run(self, name: str, call: Callable[[], ResultT]) -> ResultT:
        """Run a call, and actions posted before its end, each in an ``isolated`` context.

        Raises:
            RuntimeError: a call of this thread is in progress.
        """
        try:
            with self.lock:
                self.check(name)
                try:  # no context manager: Ctrl-C could strike between its steps
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
            self._settle_if_free()  # actions that another thread posted since

    def check(self, name: str) -> None:
        """Refuse a call inside another one of this thread.

        Raises:
            RuntimeError: a call of this thread is in progress.
        """
        with self.lock:
            if self._call is not None:
                raise RuntimeError(
                    f"{name} was called inside {self._call} of the same runner, by a callback, a "
                    f"hook, a signal handler or a finalizer: there an engine can submit, cancel "
                    f"and tell its stats, and a runner free and release; call {name} afterwards"
                )

    def soon(self, action: Callable[[], object]) -> None:
        """Do an action that no call may see half done: now, or at the end of this thread's call."""
        with self.lock:
            self.post(action)

    def post(self, action: Callable[[], object]) -> None:
        """Do an action now or, if any thread is in a call, at the end of that call."""
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
        """Do posted actions in order; an action that Ctrl-C cuts off is done again first."""
        while self._posted:
            try:
                with isolated():
                    self._posted[0]()
            except Exception:
                self._posted.popleft()
                raise
            self._posted.popleft()


class Within(Turn):
    """Turn of a caller inside a call, who makes further calls as parts of it."""

    def run(self, name: str, call: Callable[[], ResultT]) -> ResultT:
        """Run a call as a part of the one in progress."""
        return call()

    def post(self, action: Callable[[], object]) -> None:
        """Do an action as a part of the call in progress."""
        action()


def _nothing() -> None:
    pass


@runtime_checkable
class HasTurn(Protocol):
    """Runner, or engine on one."""

    @property
    def turn(self) -> Turn: ...


UserT = TypeVar("UserT", bound=HasTurn)


def in_turn(
    method: Callable[Concatenate[UserT, ParamT], ResultT],
) -> Callable[Concatenate[UserT, ParamT], ResultT]:
    """Make each call of a method wait for its turn."""

    @wraps(method)
    def call(self: UserT, /, *args: ParamT.args, **options: ParamT.kwargs) -> ResultT:
        return self.turn.run(method.__qualname__, partial(method, self, *args, **options))

    return call
