"""Lock of a model: many threads may run it, or one may trace it.

While a step is traced, its model has only its first layers (``layers_once``). Another thread that
ran the model meanwhile would run only those. A runner also sets its choice of implementations on
the model's modules. So a runner with other choices waits.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Condition, Lock
from typing import ClassVar, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from torch_hybrid.backends.select import Choice
from torch_hybrid.caches.hybrid import HybridCache
from torch_hybrid.graphs.step import Model
from torch_hybrid.graphs.stepping.model_choices import set_choices


class Attachable(Protocol):
    """Change of a model's modules for some runners, while these run or trace it."""

    def attached(self, model: nn.Module) -> AbstractContextManager[None]:
        """Have the modules changed meanwhile."""


class ModelUse:
    """Lock of one model, shared by its runners; ``of`` finds it."""

    _of_model: ClassVar[WeakKeyDictionary[Model, ModelUse]] = WeakKeyDictionary()
    _finding: ClassVar = Lock()

    def __init__(self) -> None:
        self._num_running = 0
        self._choices: Sequence[Choice] = ()
        self._attached: Sequence[Attachable] = ()  # what the model's modules have now
        self._undo = ExitStack()
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
        attached: Sequence[Attachable] = (),
        *,
        runs_model: bool = False,
    ) -> Iterator[None]:
        """Hold the model to run it; wait while it is traced, or run with other choices.

        Args:
            model: the model that runs.
            choices: implementations of its modules; none if no module's code runs, or none has a
                choice.
            attached: what its modules then have, and nothing else.
            runs_model: whether its modules' code runs.
        """
        with self._changed:
            if choices and choices != self._choices:
                self._changed.wait_for(lambda: not self._num_running)
                self._set_choices(model, choices)
            if runs_model and attached != self._attached:
                self._changed.wait_for(lambda: not self._num_running)
                self._attach(model, attached)
            self._num_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                if not self._num_running:
                    self._attach(model, ())
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
        self, model: Model, choices: Sequence[Choice], attached: Sequence[Attachable] = ()
    ) -> Iterator[None]:
        """Hold the model alone, to trace it; wait until nobody runs it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_running)
            self._set_choices(model, choices)
            self._attach(model, attached)
            try:
                yield
            finally:
                self._attach(model, ())

    def _attach(self, model: Model, attached: Sequence[Attachable]) -> None:
        """Have the model's modules as these change them, and as nothing else does."""
        if attached != self._attached:
            self._undo.close()
            self._attached = ()
            for each in attached:
                assert isinstance(model, nn.Module)
                self._undo.enter_context(each.attached(model))
            self._attached = attached

    def _set_choices(self, model: Model, choices: Sequence[Choice]) -> None:
        if choices:
            set_choices(model, choices)
            self._choices = choices
