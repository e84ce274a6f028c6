"""Who uses a model just now: many may run it, or one may trace it.

While a step is traced, its model has its first layers alone (``layers_once``). Whoever ran it
meanwhile, from another thread and another runner, would run those alone. And its experts are
computed as one runner has chosen: who chose otherwise waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Lock
from typing import ClassVar
from weakref import WeakKeyDictionary

from torch_hybrid.backends.select import Choice
from torch_hybrid.graphs.step import Model
from torch_hybrid.graphs.stepping.model_choices import set_choices


class ModelUse:
    """Of one model, shared by its runners; ``of`` finds it."""

    _of_model: ClassVar[WeakKeyDictionary[Model, ModelUse]] = WeakKeyDictionary()
    _finding: ClassVar = Lock()

    def __init__(self) -> None:
        self._num_running = 0
        self._choices: Sequence[Choice] = ()
        self._changed = Condition()

    @classmethod
    def of(cls, model: Model) -> ModelUse:
        """The one that all runners of ``model`` share."""
        with cls._finding:
            return cls._of_model.setdefault(model, cls())

    @classmethod
    def forget(cls) -> None:
        """Nobody uses any model: of what other threads did, a forked process knows nothing."""
        cls._of_model, cls._finding = WeakKeyDictionary(), Lock()

    @contextmanager
    def running(self, model: Model, choices: Sequence[Choice] = ()) -> Iterator[None]:
        """Others may run it too; waits while it is traced, or run by other choices.

        Args:
            model: that is run.
            choices: of its modules; none where no code of the model runs, or none chooses.
        """
        with self._changed:
            if choices and choices != self._choices:
                self._changed.wait_for(lambda: not self._num_running)
                self._set_choices(model, choices)
            self._num_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    @contextmanager
    def tracing(self, model: Model, choices: Sequence[Choice]) -> Iterator[None]:
        """Nobody else uses it; waits until nobody does."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_running)
            self._set_choices(model, choices)
            yield

    def _set_choices(self, model: Model, choices: Sequence[Choice]) -> None:
        if choices:
            set_choices(model, choices)
            self._choices = choices
