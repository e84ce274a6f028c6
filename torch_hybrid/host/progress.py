"""Log lines before work that takes long, and a bar on a terminal while it lasts.

Lines go to the logger "torch_hybrid", which writes them to stderr. Whoever silences that logger
(``logging.getLogger("torch_hybrid").setLevel("WARNING")``) silences the bars too.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

Advance = Callable[[int, str], None]
LOGGER = logging.getLogger("torch_hybrid")


class _ToStderr(logging.Handler):
    """A handler that looks up stderr at each line: bars and notebooks replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None:
            print(self.format(record), file=sys.stderr, flush=True)


def _set_up() -> None:
    """Show lines unless the program has configured this logger itself."""
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    if not LOGGER.handlers:
        handler = _ToStderr()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.propagate = False


_set_up()


def tell(message: str) -> None:
    """Log a line about work that begins now."""
    LOGGER.info(message)


def be_silent() -> None:
    """Disable the logger, in a process that works for another one, which logs."""
    LOGGER.disabled = True


@contextmanager
def bar(description: str, total: int | None = None) -> Iterator[Advance]:
    """Show a bar on stderr while the body runs, if that is a terminal and rich is installed.

    Bars of several threads stand below one another.

    Args:
        description: text beside the bar.
        total: number of steps; None shows the time alone.

    Returns:
        A function that counts steps as done and describes what comes next.
    """
    with _BARS.display() as display:
        if display is None:
            yield lambda by, text: None
            return
        done = 0

        def count() -> str:
            return "" if total is None else f"{done}/{total}"

        def advance(by: int, text: str) -> None:
            nonlocal done
            done += by
            display.update(task, advance=by, description=text, count=count())

        task = display.add_task(description, total=total, count=count())

        try:
            yield advance
        finally:
            display.remove_task(task)


class _Bars:
    """The one display of all bars: it begins with the first and ends with the last."""

    def __init__(self) -> None:
        self._lock, self._num_users = Lock(), 0
        self._display: Progress | None = None

    @contextmanager
    def display(self) -> Iterator[Progress | None]:
        """Open the shared display; yield None where stderr shows no bars."""
        if not LOGGER.isEnabledFor(logging.INFO) or sys.stderr is None or not sys.stderr.isatty():
            yield None
            return
        with self._lock:
            if not self._num_users:
                self._display = _new_display()
                if self._display is not None:
                    self._display.start()
            self._num_users += 1
            shown = self._display
        try:
            yield shown
        finally:
            with self._lock:
                self._num_users -= 1
                if not self._num_users and shown is not None:
                    shown.stop()


_BARS = _Bars()


def _new_display() -> Progress | None:
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )
    except ImportError:
        return None
    console = Console(stderr=True, highlight=False)
    columns = (
        SpinnerColumn("dots" if console.encoding.startswith("utf") else "line"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[count]}", style="progress.download"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True)
