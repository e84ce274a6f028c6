"""Lock of a model: many threads may run it, or one may trace it.

While a step is traced, its model has only its first layers (``layers_once``). Another thread that
ran the model meanwhile would run only those. A runner also sets its choice of implementations on
the model's modules. So a runner with other choices waits.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Condition, Lock
from typing import ClassVar
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from torch_hybrid.backends.select import Choice
from torch_hybrid.caches.hybrid import HybridCache
from torch_hybrid.graphs.step import Model
from torch_hybrid.graphs.stepping.model_choices import set_choices
from torch_hybrid.layers.adapted import AdaptedLayers


class ModelUse:
    """Lock of one model, shared by its runners; ``of`` finds it."""

    _of_model: ClassVar[WeakKeyDictionary[Model, ModelUse]] = WeakKeyDictionary()
    _finding: ClassVar = Lock()

    def __init__(self) -> None:
        self._num_running = 0
        self._choices: Sequence[Choice] = ()
        self._adapted: AdaptedLayers | None = None  # whose hooks the model has
        self._hooks = ExitStack()
        self._changed = Condition()
        self.caches: WeakSet[HybridCache] = WeakSet()  # of the model's runners

    @classmethod
    def of(cls, model: Model) -> ModelUse:
        """Find the lock that all runners of ``model`` share."""
        with cls._finding:
            return cls._of_model.setdefault(model, cls())

    @classmethod
    def forget(cls) -> None:
        """Drop all locks, in a forked process: the threads that held them do not exist there."""
        cls._of_model, cls._finding = WeakKeyDictionary(), Lock()

    def check_unheld_elsewhere(self, own: HybridCache) -> None:
        """Raise ValueError if a runner with another cache than ``own`` holds states of the model.

        Its kept prefixes count too: its own threads alone may drop them.
        """
        if any(cache.keeps_anything for cache in self.caches if cache is not own):
            gc.collect()  # runners that nobody has any more
        if any(cache.keeps_anything for cache in self.caches if cache is not own):
            raise ValueError(
                "another runner of the model holds sequences, snapshots or kept prefixes, with "
                "states of the weights as they are: free and release them, and close its engines "
                "first"
            )

    @contextmanager
    def running(
        self,
        model: Model,
        choices: Sequence[Choice] = (),
        adapted: AdaptedLayers | None = None,
        *,
        runs_model: bool = False,
    ) -> Iterator[None]:
        """Hold the model to run it; wait while it is traced, or run with other choices.

        Args:
            model: the model that runs.
            choices: implementations of its modules; none if no module's code runs, or none has a
                choice.
            adapted: layers whose hooks the model then has; None: no hooks.
            runs_model: whether its modules' code runs.
        """
        with self._changed:
            if choices and choices != self._choices:
                self._changed.wait_for(lambda: not self._num_running)
                self._set_choices(model, choices)
            if runs_model and adapted is not self._adapted:
                self._changed.wait_for(lambda: not self._num_running)
                self._attach(model, adapted)
            self._num_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                if not self._num_running:
                    self._attach(model, None)
                self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let go of the model, which this thread holds to run it, so that it can trace."""
        with self._changed:
            self._num_running -= 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._num_running += 1

    @contextmanager
    def tracing(
        self, model: Model, choices: Sequence[Choice], adapted: AdaptedLayers | None = None
    ) -> Iterator[None]:
        """Hold the model alone, to trace it; wait until nobody runs it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_running)
            self._set_choices(model, choices)
            self._attach(model, adapted)
            try:
                yield
            finally:
                self._attach(model, None)

    def _attach(self, model: Model, adapted: AdaptedLayers | None) -> None:
        """Have the model's adapted layers call these hooks, and no others."""
        if adapted is not self._adapted:
            self._hooks.close()
            if adapted is not None:
                assert isinstance(model, nn.Module)
                self._hooks.enter_context(adapted.attached(model))
            self._adapted = adapted

    def _set_choices(self, model: Model, choices: Sequence[Choice]) -> None:
        if choices:
            set_choices(model, choices)
            self._choices = choices
