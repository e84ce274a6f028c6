"""Compiled steps in a file, for processes that neither trace nor generate code.

    facts.json   facts that the graphs were made for: a process of other facts cannot use them
    steps        each variant's text, its arguments by name, and its record
    regions      each distinct region as Inductor serializes it
    kernels, ops the C++ of the regions, and of the ops that they call
    triton       kernels that Triton has built for ops, and how they are launched

Loading runs code from the file: load no file that you do not trust.
"""

from __future__ import annotations

import json
import pickle
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor, nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.graphs.artefact.regions import dump_region, load_region
from torch_hybrid.graphs.artefact.triton_kernels import bring_kernels, read_kernels
from torch_hybrid.graphs.compiling.compile import GraphRecord
from torch_hybrid.graphs.compiling.compile_region import CompiledRegion
from torch_hybrid.graphs.compiling.compiled_step import Arguments, CompiledGraph
from torch_hybrid.graphs.compiling.regions import link
from torch_hybrid.graphs.compiling.signature import own_tensors
from torch_hybrid.graphs.compiling.sources import changed_sources
from torch_hybrid.graphs.step import Caches, Model
from torch_hybrid.ops.native.build import bring_libraries, loaded_libraries, unpack_library

_FORMAT = 2
_FACTS, _STEPS = "facts.json", "steps.pickle"
Choices = tuple[tuple[str, str], ...]  # each op with its implementation
_REGIONS, _KERNELS, _OPS, _TRITON = "regions", "kernels", "ops", "triton"


class StaleArtefactError(RuntimeError):
    """Mismatch of an artefact and this process; the message says why it cannot be used."""


@dataclass(frozen=True, slots=True)
class _Named:
    """Tensor by its name in the model or its caches."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedGraph:
    """Graph whose tensors are named and whose regions are numbered."""

    text: str
    regions: tuple[int, ...]
    counts: tuple[int, ...]
    ops: Counter[str]
    given: tuple[str | _Named, ...]
    sizes: tuple[str, ...]
    shapes: Mapping[str, tuple[int | str | None, ...]]
    holds: str
    constants: str
    sources: Mapping[str, str]
    choices: Choices
    record: GraphRecord


def named_tensors(model: Model, caches: Caches) -> dict[str, Tensor]:
    """Collect every tensor of a model and of its caches, by name."""
    named = {
        f"caches.{kind}.{index}.{name}": tensor
        for kind, layers in caches.items()
        for index, layer in enumerate(layers)
        for name, tensor in layer.items()
    }
    if isinstance(model, nn.Module):
        for path, module in model.named_modules(remove_duplicate=False):
            named |= {f"model.{path}.{name}": tensor for name, tensor in own_tensors(module)}
    return named


def save(
    path: Path,
    steps: Mapping[str, tuple[CompiledGraph, GraphRecord]],
    choices: Choices,
    facts: Mapping[str, str],
    named: Mapping[str, Tensor],
) -> None:
    """Write compiled steps to a file, all or nothing.

    Args:
        path: the file to write; its folder must exist.
        steps: the graph and the record of each variant, by the variant's name.
        choices: implementations of ops that the inputs of steps do not show.
        facts: facts under which the graphs are valid (``facts_of``).
        named: tensors that graphs may be bound to.

    Raises:
        UnsupportedError: a graph cannot be saved: an argument or a region of it is not in the file.
        OSError: the file cannot be written.
    """
    names = {id(tensor): name for name, tensor in named.items()}
    regions: dict[int, CompiledRegion] = {}
    saved: dict[str, _SavedGraph] = {}
    for variant, (graph, record) in steps.items():
        regions |= {id(region): region for region in graph.regions}
        numbers = {key: number for number, key in enumerate(regions)}
        try:
            saved[variant] = _saved(graph, record, choices, names, numbers)
        except UnsupportedError as error:
            raise UnsupportedError(f"{variant} steps cannot be saved: {error}") from error
    kernels: dict[str, Path] = {}
    dumped = [dump_region(region, kernels) for region in regions.values()]
    with TemporaryDirectory(dir=path.parent) as folder:
        partial = Path(folder, path.name)
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr(_FACTS, json.dumps({"format": _FORMAT, **facts}, indent=1))
            file.writestr(_STEPS, pickle.dumps(saved))
            for number, data in enumerate(dumped):
                file.writestr(f"{_REGIONS}/{number}", data)
            for kind, libraries in ((_KERNELS, kernels), (_OPS, loaded_libraries())):
                for key, library in libraries.items():
                    file.write(library, f"{kind}/{key}")
            for name, kernel in read_kernels().items():
                file.writestr(f"{_TRITON}/{name}", kernel)
        partial.replace(path)


def _saved(
    graph: CompiledGraph,
    record: GraphRecord,
    choices: Choices,
    names: Mapping[int, str],
    numbers: Mapping[int, int],
) -> _SavedGraph:
    arguments = graph.arguments
    given: list[str | _Named] = []
    for argument in arguments.given:
        if isinstance(argument, Tensor):
            if id(argument) not in names:
                shape = tuple(argument.shape)
                raise UnsupportedError(f"a tensor of shape {shape} has no name in the model")
            given.append(_Named(names[id(argument)]))
        else:
            given.append(argument)
    return _SavedGraph(
        text=graph.text,
        regions=tuple(numbers[id(region)] for region in graph.regions),
        counts=graph.counts,
        ops=graph.ops,
        given=tuple(given),
        sizes=arguments.sizes,
        shapes=arguments.shapes,
        holds=arguments.holds,
        constants=graph.constants,
        sources=graph.sources,
        choices=choices,
        record=record,
    )


class Artefact:
    """Open file of compiled steps whose facts match this process.

    Args:
        path: the file.
        facts: facts of this process, its model and its runner.

    Raises:
        FileNotFoundError: there is no such file.
        StaleArtefactError: the file is no artefact, has other facts, or was made of other code.
    """

    def __init__(self, path: Path, facts: Mapping[str, str]) -> None:
        try:
            self._file = zipfile.ZipFile(path)
            made_for = json.loads(self._file.read(_FACTS))
            if broken := self._file.testzip():
                raise zipfile.BadZipFile(f"{broken} has changed")
        except (zipfile.BadZipFile, zlib.error, KeyError, ValueError) as error:
            raise StaleArtefactError(f"{path} is no artefact of torch_hybrid: {error}") from error
        here = {"format": _FORMAT, **facts}
        differ = [name for name in here if made_for.get(name) != here[name]]
        if differ:
            listed = "; ".join(f"{n}: {made_for.get(n)} there, {here[n]} here" for n in differ)
            raise StaleArtefactError(f"{path} was made for something else ({listed})")
        self._steps: dict[str, _SavedGraph] = pickle.loads(self._file.read(_STEPS))
        if changed := sorted({m for s in self._steps.values() for m in changed_sources(s.sources)}):
            raise StaleArtefactError(f"{path} was made of other code ({', '.join(changed)})")
        self._kernels = self._unpacked(_KERNELS)
        bring_libraries(self._unpacked(_OPS))
        self.triton_kernels = frozenset(bring_kernels(self._files(_TRITON)))
        self._regions: dict[int, CompiledRegion] = {}

    @property
    def variants(self) -> Collection[str]:
        """Names of the variants whose steps are in the file."""
        return self._steps.keys()

    def graph(
        self, variant: str, constants: str, choices: Choices, named: Mapping[str, Tensor]
    ) -> tuple[CompiledGraph, GraphRecord] | None:
        """Find the graph of a variant and its record; None if the file's graph is of other choices.

        Args:
            variant: name of the variant.
            constants: constants of the inputs that it is traced with (``constants_of``).
            choices: implementations of ops that the inputs do not show.
            named: tensors to bind the graph to.
        """
        saved = self._steps[variant]
        if (saved.constants, saved.choices) != (constants, choices):
            return None
        regions = tuple(self._region(number) for number in saved.regions)
        given = tuple(named[x.name] if isinstance(x, _Named) else x for x in saved.given)
        graph = CompiledGraph(
            text=saved.text,
            regions=regions,
            counts=saved.counts,
            ops=saved.ops,
            arguments=Arguments(
                given=given, sizes=saved.sizes, shapes=saved.shapes, holds=saved.holds
            ),
            call=link(saved.text, [region.call for region in regions]),
            constants=constants,
            sources=saved.sources,
        )
        return graph, replace(saved.record, is_loaded=True)

    def _region(self, number: int) -> CompiledRegion:
        if number not in self._regions:
            data = self._file.read(f"{_REGIONS}/{number}")
            self._regions[number] = load_region(data, self._kernels)
        return self._regions[number]

    def _unpacked(self, folder: str) -> dict[str, Path]:
        """Unpack the libraries of a folder, each to a file to load it from, by key."""
        return {name: unpack_library(data) for name, data in self._files(folder).items()}

    def _files(self, folder: str) -> dict[str, bytes]:
        prefix = f"{folder}/"
        names = [name for name in self._file.namelist() if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._file.read(name) for name in names}
