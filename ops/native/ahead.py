"""Builds of the chosen implementations' C++ kernels, many at once, before their first calls."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread, main_thread

from torch_hybrid.host.progress import bar, tell
from torch_hybrid.ops.core.capability import Implementation, source_of
from torch_hybrid.ops.native.build import BuildError, is_there, library_of

_SECONDS = 7  # that a core takes for a library: the median of all, on an Ice Lake Xeon
_BUILDING = "building C++ kernels"
_STARTED: dict[Path, Future[None]] = {}
if sys.platform != "win32":
    os.register_at_fork(after_in_child=_STARTED.clear)  # no thread of the parent's builds there


class Builds:
    """Libraries that threads build: first those that are called first."""

    def __init__(self, first: Sequence[Path], others: Sequence[Path]) -> None:
        self._first = [_STARTED[source] for source in first]
        self._all = [*self._first, *(_STARTED[source] for source in others)]

    @property
    def are_done(self) -> bool:
        """State of the builds: True when none is left to wait for."""
        return all(build.done() for build in self._all)

    def wait_for_first(self) -> None:
        """Wait for the libraries that are called first; errors are raised where a kernel is
        called."""
        _wait(self._first)

    def wait(self) -> None:
        """Wait for all libraries, like ``wait_for_first``."""
        _wait(self._all)


def build_ahead(first: Iterable[Implementation], others: Iterable[Implementation] = ()) -> Builds:
    """Start to build those libraries of implementations that the cache lacks, and tell how many.

    A call of a kernel waits only for its own library. A process that ends waits for the builds in
    progress.
    """
    early, late = (
        sorted({s for each in some for s in _sources_of(each)}) for some in (first, others)
    )
    new = [source for source in dict.fromkeys([*early, *late]) if source not in _STARTED]
    futures: dict[Path, Future[None]] = {source: Future() for source in new}
    _STARTED.update(futures)
    num_missing = sum(not is_there(source.parent.name, source) for source in new)
    num_threads = min(os.cpu_count() or 1, len(new))
    if num_missing:
        seconds = -(-num_missing * _SECONDS // min(num_threads, num_missing))
        tell(f"{_BUILDING}: {num_missing}, once for this machine, in about {seconds} s")
    waiting = deque(new)

    def work() -> None:
        while waiting:
            with suppress(BuildError, IndexError):
                source = waiting.popleft()
                try:
                    if main_thread().is_alive():
                        library_of(source.parent.name, source)
                finally:
                    futures[source].set_result(None)

    for _ in range(num_threads):
        Thread(target=work, name="build-ahead").start()
    return Builds(early, late)


def _wait(builds: Sequence[Future[None]]) -> None:
    missing = [build for build in builds if not build.done()]
    if not missing:
        return
    with bar(_BUILDING, total=len(missing)) as advance:
        for build in missing:
            build.result()
            advance(1, _BUILDING)


def _sources_of(implementation: Implementation) -> Iterable[Path]:
    """Find the C++ sources beside a launcher, and beside its ``figures``: a module calls those that
    its name begins with."""
    for function in (implementation.launcher, implementation.figures):
        name = function.partition(":")[0] if isinstance(function, str) else ""
        if name.endswith(".cpp"):
            yield source_of(name)
        elif module := _file_of(name):
            sources = module.parent.glob("*.cpp")
            yield from (source for source in sources if module.stem.startswith(source.stem))


def _file_of(module: str) -> Path | None:
    """Find the file of a module: None of a script, a notebook and code without a file, and of what
    cannot be imported, which is told to whoever calls it."""
    try:
        spec = find_spec(module)
    except (ValueError, ModuleNotFoundError):  # it has no spec, or its package is missing
        return None
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None
