"""Store of compiled steps that a runner finds in a file, and writes to one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch_hybrid.backends.select import Backends, Choice, impls_of
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.graphs.artefact.facts import facts_of
from torch_hybrid.graphs.artefact.file import (
    Artefact,
    StaleArtefactError,
    named_tensors,
    save,
)
from torch_hybrid.graphs.artefact.kept import drop_oldest, kept_path
from torch_hybrid.graphs.artefact.triton_kernels import noted_kernels
from torch_hybrid.graphs.compiling.compile import GraphRecord
from torch_hybrid.graphs.compiling.compiled_step import CompiledGraph, constants_of
from torch_hybrid.graphs.compiling.sources import UNKNOWN
from torch_hybrid.graphs.passes import Pass
from torch_hybrid.graphs.step import Caches, Inputs, Model


class StepStore:
    """Store of a runner's compiled steps, in the artefact at ``path`` if its facts match.

    An artefact that does not match is named in a warning, and will be overwritten; a missing one
    will be written. One that the user's cache keeps does both without a word.

    Args:
        path: the file; None: the one that is kept for these facts, if any.
        model: the model that the steps run.
        caches: pools of its layers.
        passes: passes over its graphs.
        backends: the implementations that were asked for: a kept file has steps of these alone.
        sizes: sizes of the runner, by name.

    Raises:
        ValueError: the folder of ``path`` does not exist, so that nothing could be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        model: Model,
        caches: Caches,
        passes: Sequence[Pass],
        *,
        backends: Backends | None,
        **sizes: object,
    ) -> None:
        self._model, self._caches = model, caches
        # Of the model as it is now: a step with adapters has hooks in it.
        self._facts = facts_of(model, passes, **sizes)
        self.is_kept = path is None
        wanted = {"backends": str(backends)}
        self.path = kept_path(self._facts | wanted) if path is None else Path(path)
        self._artefacts: list[Artefact] = []
        self._saved_kernels: set[str] = set()
        if self.path is not None and not self.path.parent.is_dir():
            raise ValueError(f"cannot write an artefact to {self.path}: the folder is not there")
        if self.path is not None and self.path.exists():
            try:
                self.open(self.path)
            except StaleArtefactError as error:
                self._warn(f"{error}; steps are compiled anew", stacklevel=7)

    @property
    def is_open(self) -> bool:
        """Flag: an artefact was found and matches."""
        return bool(self._artefacts)

    @property
    def lacks_kernels(self) -> bool:
        """Flag: Triton has used kernels since that no artefact has."""
        known = self._saved_kernels.union(*(file.triton_kernels for file in self._artefacts))
        return not noted_kernels() <= known

    def open(self, path: Path) -> None:
        """Open one more artefact, and find steps in it too.

        Raises:
            FileNotFoundError: there is no such file.
            StaleArtefactError: its facts do not match.
        """
        self._artefacts.append(Artefact(path, self._facts))

    def has(self, variants: Iterable[str]) -> bool:
        """Tell whether there are steps of all these variants."""
        return {*variants} <= {name for file in self._artefacts for name in file.variants}

    def find(
        self, variant: str, inputs: Inputs, choices: Sequence[Choice]
    ) -> tuple[CompiledGraph, GraphRecord] | None:
        """Find a variant's graph and its record; None if there are none with these choices.

        Args:
            variant: name of the variant.
            inputs: inputs that it would be traced with.
            choices: implementations of ops that the inputs do not show.
        """
        files = [file for file in self._artefacts if variant in file.variants]
        constants, impls = constants_of(inputs), impls_of(choices)
        for file in reversed(files):
            if found := file.graph(variant, constants, impls, self._named):
                return found
        if files:
            self._warn(
                f"{self.path} has {variant} steps of other implementations; they are compiled anew",
                stacklevel=5,
            )
        return None

    def save(
        self,
        path: Path,
        steps: Mapping[str, tuple[CompiledGraph, GraphRecord]],
        choices: Sequence[Choice],
    ) -> None:
        """Write steps to a file: each with its graph and its record.

        Raises:
            UnsupportedError: a graph cannot be saved: an argument or a region of it is not in the
                file.
            OSError: the file cannot be written.
        """
        kernels = noted_kernels()
        save(path, steps, impls_of(choices), self._facts, self._named)
        if path == self.path:
            self._saved_kernels = kernels

    def keep(
        self, steps: Mapping[str, tuple[CompiledGraph, GraphRecord]], choices: Sequence[Choice]
    ) -> None:
        """Write steps to the store's own file, if it has one; a warning says why that fails."""
        if self.path is None:
            return
        if self.is_kept and any(UNKNOWN in graph.sources.values() for graph, _ in steps.values()):
            return
        try:
            self.save(self.path, steps, choices)
        except (OSError, UnsupportedError) as error:  # the steps themselves are there
            self._warn(f"no artefact is written to {self.path}: {error}", stacklevel=5)
        if self.is_kept:
            drop_oldest(self.path.parent)

    def _warn(self, message: str, *, stacklevel: int) -> None:
        if not self.is_kept:
            warnings.warn(message, stacklevel=stacklevel)

    @cached_property
    def _named(self) -> dict[str, Any]:
        return named_tensors(self._model, self._caches)
