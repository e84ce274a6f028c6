"""Work in a forked process, which has this one's memory as it is, and hands back what it yields.

A fork has everything that is in memory, whoever made it: nothing has to be pickled, and pages that
neither process writes are there once. What it does not have is this process's other threads. Those
of OpenMP, of which the forking thread believes that they wait for it, would never answer: the work
runs in a thread of its own, which starts new ones.

The child leads a process group: it is ended with all that it has started (compilers). It also ends
when its parent does, however that ends, and be it that it was stopped.
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

_SET_DEATH_SIGNAL = 1  # of Linux's prctl: the number that a child gets when its parent ends
_PATIENCE = 2.0  # seconds that a compiler has to take away what it has half written


class ForkedError(RuntimeError):
    """The work raised, or its process was ended from elsewhere."""


def can_fork() -> bool:
    """Whether a process that has run torch on its CPU can be forked here: the system's libraries
    do not survive it elsewhere."""
    return sys.platform == "linux"


class Forked:
    """A process that runs ``work`` and sends what it yields.

    Locks that other threads hold are never let go there: ``work`` must need none of them.

    Args:
        work: what it yields is pickled; what it raises becomes the ``ForkedError`` of ``receive``.
    """

    def __init__(self, work: Callable[[], Iterator[object]]) -> None:
        self._results, results = Pipe(duplex=False)
        alive, self._alive = Pipe(duplex=False)  # which the child reads until this process ends
        # Python's warning of locks that other threads hold is for the caller to heed. This filter
        # is of this module alone, and stays: another thread may set filters meanwhile.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=re.escape(__name__))
        self._pid = os.fork()
        if not self._pid:
            self._results.close()
            self._alive.close()
            _be_child(work, results, alive)
        results.close()
        alive.close()
        with suppress(EOFError):  # it ended at once, as ``receive`` will say
            self._results.recv()  # not before it has let go of the pipes of others
        with suppress(OSError):  # the child has done so, or has ended
            os.setpgid(self._pid, self._pid)
        self._closing = Lock()
        self._is_closed = self._is_reaped = False
        self._pausing, self._num_pauses = Lock(), 0

    @property
    def pid(self) -> int:
        """Of the process and its group."""
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
        """The process stands still, with what it has started, until nobody has it paused."""
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
        """Whether any process of the group is left."""
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
        """Send a signal to the group; whether there was one."""
        try:
            os.killpg(self._pid, number)
        except ProcessLookupError:
            return False
        return True


def _be_child(
    work: Callable[[], Iterator[object]], results: Connection, alive: Connection
) -> NoReturn:
    """All that the forked process does: nothing of the parent's runs at its end."""
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
        # torch's configs are of a context, which a thread starts without.
        worker = Thread(target=copy_context().run, args=(_send_all, work, results))
        worker.start()
        worker.join()
    finally:
        os._exit(0)


def _let_go_of_pipes(kept: Collection[int]) -> None:
    """Close what other threads of the parent had open to talk to others: a process that they have
    just started would not see its pipe's end, nor they the end of its. Numbers stay taken."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept:
            with suppress(OSError):  # of the listing itself
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
