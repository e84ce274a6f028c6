"""Builds the kernels of what was chosen side by side, before they are called one by one."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread, main_thread

from torch_hybrid.ops.capability import Implementation
from torch_hybrid.ops.native.build import BuildError, library_of

_STARTED: set[Path] = set()


def build_ahead(implementations: Iterable[Implementation]) -> None:
    """Start to build the libraries of these implementations that the cache does not have.

    Whoever calls a kernel meanwhile waits for its library and no other. What does not build is told
    there. A process that ends waits for the libraries that are being built.
    """
    sources = {source for each in implementations for source in _sources_of(each)} - _STARTED
    _STARTED.update(sources)
    waiting = deque(sorted(sources))

    def work() -> None:
        while waiting and main_thread().is_alive():
            with suppress(BuildError, IndexError):
                source = waiting.popleft()
                library_of(source.parent.name, source)

    for _ in range(min(os.cpu_count() or 1, len(waiting))):
        Thread(target=work, name="build-ahead").start()


def _sources_of(implementation: Implementation) -> Iterable[Path]:
    """The C++ files beside its launcher, and beside what measures its forms, whose names begin
    theirs: ``_cpu_invariant`` calls what ``_cpu.cpp`` has."""
    for function in (implementation.launcher, implementation.figures):
        if isinstance(function, str) and (module := _file_of(function.partition(":")[0])):
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
