"""Who uses a model just now: many may run it, or one may trace it.

While a step is traced, its model has its first layers alone (``layers_once``). Whoever ran it
meanwhile, from another thread and another runner, would run those alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, Lock
from typing import ClassVar
from weakref import WeakKeyDictionary

from torch_hybrid.graphs.step import Model


class ModelUse:
    """Of one model, shared by its runners; ``of`` finds it."""

    _of_model: ClassVar[WeakKeyDictionary[Model, ModelUse]] = WeakKeyDictionary()
    _finding: ClassVar = Lock()

    def __init__(self) -> None:
        self._num_running = 0
        self._changed = Condition()

    @classmethod
    def of(cls, model: Model) -> ModelUse:
        """The one that all runners of ``model`` share."""
        with cls._finding:
            return cls._of_model.setdefault(model, cls())

    @contextmanager
    def running(self) -> Iterator[None]:
        """Others may run it too; waits while it is traced."""
        with self._changed:
            self._num_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Nobody else uses it; waits until nobody does."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_running)
            yield
