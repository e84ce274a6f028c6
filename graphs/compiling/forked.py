"""Forked process that works on a copy of this process's memory, and sends its results back.

A fork shares all memory, so nothing is pickled, and pages that neither process writes exist once.
But it has only the forking thread. That thread believes that OpenMP's threads wait for it, and they
would never answer. So the work runs in a new thread, for which OpenMP starts new ones.

The child leads a process group: ending it ends the compilers that it has started, too. It also ends
when its parent does, in whatever way, even while it is stopped.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import stat
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from multiprocessing.connection import Connection, Pipe
from threading import Lock, Thread
from typing import NoReturn

_SET_DEATH_SIGNAL = 1  # option of Linux's prctl: the signal that a child gets when its parent ends
_PATIENCE = 2.0  # seconds that a compiler has to remove half-written files


class ForkedError(RuntimeError):
    """Failure of the forked work: it raised, or somebody else ended its process."""


def can_fork() -> bool:
    """Tell whether a process that has run torch on its CPU can be forked.

    On other systems than Linux, the system's libraries do not survive a fork.
    """
    return sys.platform == "linux"


class Forked:
    """Process that runs ``work`` and sends the values that ``work`` yields.

    Locks that other threads hold at the fork are never released in it: ``work`` must need none of
    them.

    Args:
        work: generator whose values are pickled; an error in it becomes the ``ForkedError`` of
            ``receive``.
    """

    def __init__(self, work: Callable[[], Iterator[object]]) -> None:
        self._results, results = Pipe(duplex=False)
        alive, self._alive = Pipe(duplex=False)  # the child reads it until this process ends
        # Python warns of locks that other threads hold; the caller takes care of them. The filter
        # is for this module alone, and stays: another thread may set filters meanwhile.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=re.escape(__name__))
        self._pid = os.fork()
        if not self._pid:
            self._results.close()
            self._alive.close()
            _be_child(work, results, alive)
        results.close()
        alive.close()
        with suppress(EOFError):  # it ended at once, as ``receive`` will say
            self._results.recv()  # wait until it has closed the pipes of other threads
        with suppress(OSError):  # the child has done so, or has ended
            os.setpgid(self._pid, self._pid)
        self._closing = Lock()
        self._is_closed = self._is_reaped = False
        self._pausing, self._num_pauses = Lock(), 0

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its group."""
        return self._pid

    def receive(self) -> object:
        """Wait for the next result.

        Raises:
            EOFError: the work is done, or the process was closed.
            ForkedError: the work failed.
        """
        try:
            succeeded, value = self._results.recv()
        except EOFError:
            if self._is_closed:
                raise
            raise ForkedError("the process that compiles was ended from elsewhere") from None
        if not succeeded:
            raise ForkedError(value) if value else EOFError
        return value

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the process and all that it has started, until no caller has it paused."""
        self._pause(1)
        try:
            yield
        finally:
            self._pause(-1)

    def _pause(self, change: int) -> None:
        with self._pausing:
            self._num_pauses += change
            if not self._is_reaped:  # else its number may be another process's
                self._signal(signal.SIGSTOP if self._num_pauses else signal.SIGCONT)

    def close(self) -> None:
        """End the process, with what it has started."""
        with self._closing:
            if self._is_reaped:
                return
            self._is_closed = True
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # paused, it would not end
            ends = time.monotonic() + _PATIENCE
            while self._lives() and time.monotonic() < ends:
                time.sleep(0.01)
            self._signal(signal.SIGKILL)
            if not self._is_reaped:
                self._reap(0)
            self._alive.close()

    def _lives(self) -> bool:
        """Tell whether any process of the group is left."""
        if not self._is_reaped:
            self._reap(os.WNOHANG)
        return self._signal(0)

    def _reap(self, options: int) -> None:
        try:
            pid, _ = os.waitpid(self._pid, options)
        except ChildProcessError:  # somebody waits for all children of this process
            pid = self._pid
        self._is_reaped = pid == self._pid

    def _signal(self, number: int) -> bool:
        """Send a signal to the group, and tell whether the group exists."""
        try:
            os.killpg(self._pid, number)
        except ProcessLookupError:
            return False
        return True


def _be_child(
    work: Callable[[], Iterator[object]], results: Connection, alive: Connection
) -> NoReturn:
    """Do the forked process's whole work; at its end, no exit handler of the parent runs."""
    try:
        with suppress(OSError):  # the parent was faster
            os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        _let_go_of_pipes({results.fileno(), alive.fileno()})
        results.send(None)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        # Stopped, it would not see that its parent has ended.
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGCONT)
        Thread(target=_end_with, args=(alive,), daemon=True).start()
        # torch's configs live in a context; a new thread starts without one.
        worker = Thread(target=copy_context().run, args=(_send_all, work, results))
        worker.start()
        worker.join()
    finally:
        os._exit(0)


def _let_go_of_pipes(kept: Collection[int]) -> None:
    """Close the pipes and sockets of the parent's other threads; their numbers stay taken.

    Otherwise a process that such a thread has just started would never see its pipe end, nor would
    the thread.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept:
            with suppress(OSError):  # the number of the listing itself
                mode = os.fstat(number).st_mode
                if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                    os.dup2(nothing, number, inheritable=False)


def _end_with(parent: Connection) -> None:
    with suppress(EOFError):
        parent.recv()
    os.killpg(0, signal.SIGCONT)  # what is stopped would not end
    os.killpg(0, signal.SIGTERM)


def _send_all(work: Callable[[], Iterator[object]], results: Connection) -> None:
    try:
        for value in work():
            results.send((True, value))
        results.send((False, None))
    except BaseException as error:  # a fork that raised has nobody else to tell
        results.send((False, str(error) or type(error).__name__))
