"""Compiled steps, which run without Dynamo.

Dynamo looks up a graph's arguments at every call, and checks every guard of the trace. The steps of
a runner differ in sizes alone. So a graph keeps its arguments, and its size guards are evaluated
once for each bucket of inputs.

    tensors of the model and its pools:  kept from the trace
    tensors and sizes of the inputs:     read from a path, "inputs.rows.size()[0]"
    sizes that fit no graph:             traced by Dynamo, which adds one more graph
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph
from torch.utils import _pytree as pytree

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.graphs.compiling.compile_region import CompiledRegion
from torch_hybrid.graphs.compiling.kernels_ahead import KernelsAhead
from torch_hybrid.graphs.passes.values import value_of

INPUTS = "inputs"  # the step's argument that holds all that changes from step to step
_TRACED_INPUTS = f"L['{INPUTS}']"  # as Dynamo writes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments of a compiled graph, and the inputs that it may be called on.

    Attributes:
        given: each argument: a tensor that is the same at every step, or a path in the inputs.
        shapes: shape of each tensor of the inputs, by its path: numbers, paths of the same size, or
            None for a size that follows from others.
        sizes: paths of the sizes in ``holds``.
        holds: guard expression over ``sizes``; empty if the graph serves all sizes.
    """

    given: tuple[Tensor | str, ...]
    sizes: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int | str | None, ...]] = field(default_factory=dict)
    holds: str = ""

    def fit(self, inputs: Any) -> bool:
        """Tell whether the graph may be called on ``inputs``."""
        sizes = {place: _at(place, inputs) for place in self.sizes}
        for place, shape in self.shapes.items():
            for size, wanted in zip(_at(place, inputs).shape, shape, strict=True):
                expected = sizes[wanted] if isinstance(wanted, str) else wanted
                if expected is not None and size != expected:
                    return False
        if not self.holds:
            return True
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        # A graph for sizes from 2 on also computes one row right: Dynamo's guards against size 1
        # are about strides in memory and about broadcasting.
        several = [max(size, 2) for size in sizes.values()]
        return bool(ShapeEnv().evaluate_guards_expression(self.holds, several))

    def of(self, inputs: Any) -> list[Any]:
        """Collect the arguments of a step with these inputs."""
        return [_at(x, inputs) if isinstance(x, str) else x for x in self.given]


def arguments_of(graph: Graph, added: Sequence[Tensor]) -> Arguments:
    """Find the arguments of a graph that Dynamo traced and that is compiled already.

    Args:
        graph: the graph; its last placeholders stand for the tensors ``added``.
        added: tensors of copied layers, which Dynamo does not know.

    Raises:
        UnsupportedError: an argument is neither a tensor nor part of the step's inputs.
    """
    placeholders = graph.find_nodes(op="placeholder")
    traced = placeholders[: len(placeholders) - len(added)]
    given: list[Tensor | str] = []
    sizes: dict[str, torch.SymInt] = {}
    for node in traced:
        place: str = node.meta["grapharg"].source.name
        example = node.meta["grapharg"].example
        if place.startswith(_TRACED_INPUTS):
            given.append(found := INPUTS + place.removeprefix(_TRACED_INPUTS))
            if isinstance(value_of(node), torch.SymInt):
                sizes[found] = value_of(node)
        elif isinstance(example, Tensor):
            given.append(example)
        else:
            raise UnsupportedError(f"{place} is no tensor, and no part of the step's inputs")
    places = {str(size): place for place, size in sizes.items()}
    shapes = {
        place: tuple(_size(n, places) for n in value_of(node).shape)
        for place, node in zip(given, traced, strict=True)
        if isinstance(place, str) and isinstance(value_of(node), Tensor)
    }
    return Arguments(
        given=(*given, *added),
        sizes=tuple(sizes),
        shapes=shapes,
        holds=_guards(sizes.values()),
    )


def arguments_on(inputs: Any, graph: Graph, added: Sequence[Tensor]) -> list[Any]:
    """Collect the arguments of a traced graph for other inputs; of None, those of the trace."""
    placeholders = graph.find_nodes(op="placeholder")
    graphargs = [n.meta["grapharg"] for n in placeholders[: len(placeholders) - len(added)]]
    found = []
    for grapharg in graphargs:
        place: str = grapharg.source.name
        if inputs is not None and place.startswith(_TRACED_INPUTS):
            found.append(_at(INPUTS + place.removeprefix(_TRACED_INPUTS), inputs))
        else:
            found.append(grapharg.example)
    return [*found, *added]


def _size(size: int | torch.SymInt, places: Mapping[str, str]) -> int | str | None:
    return size if isinstance(size, int) else places.get(str(size))


def _guards(sizes: Iterable[torch.SymInt]) -> str:
    """Write the size guards of a trace and its compilation as one expression."""
    sizes = list(sizes)
    if not sizes:
        return ""
    return sizes[0].node.shape_env.produce_guards_expression(sizes) or ""


def _at(place: str, inputs: Any) -> Any:
    return eval(place, {INPUTS: inputs})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGraph:
    """Compiled form of one graph.

    Attributes:
        arguments: arguments of ``call``.
        call: returns the graph's outputs.
        text: source of ``call``, which calls the regions in turn (``regions.step_text``).
        regions: the distinct compiled regions.
        counts: number of calls of each region.
        ops: "op[impl]" to number of calls, over all regions.
        constants: constants of the inputs that the graph was traced with (``constants_of``).
        sources: digests of the files whose code was traced, by module (``sources_of``).
        kernels: builder of its ops' kernels; None on a CPU, and of a graph that was loaded.
    """

    arguments: Arguments
    call: Callable[..., Sequence[Any]]
    text: str = ""
    regions: tuple[CompiledRegion, ...] = ()
    counts: tuple[int, ...] = ()
    ops: Counter[str] = field(default_factory=Counter)
    constants: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    kernels: KernelsAhead | None = None

    def fits(self, inputs: Any) -> bool:
        """Tell whether the graph may be called on these inputs."""
        return self.constants == constants_of(inputs) and self.arguments.fit(inputs)

    def call_of_traced(self, *given: Any) -> Sequence[Any]:
        """Call the graph on Dynamo's arguments; append the tensors of copied layers."""
        return self.call(*given, *self.arguments.given[len(given) :])


class CompiledStep:
    """Step that runs from its compiled graphs; Dynamo traces it for inputs that fit none.

    Args:
        trace: ``trace(inputs, caches)`` runs the step through Dynamo, which appends new graphs to
            ``graphs``.
        graphs: graphs of the step so far.
    """

    def __init__(self, trace: Callable[[Any, Any], Tensor], graphs: list[CompiledGraph]) -> None:
        self._trace, self.graphs = trace, graphs
        # Keyed by the identity of the inputs, which are kept alive: one for each bucket.
        self._bound: dict[int, tuple[Any, Callable[..., Sequence[Any]], list[Any]]] = {}

    def __call__(self, inputs: Any, caches: Any) -> Tensor:
        """Run one step; ``inputs`` stay at fixed addresses, and ``caches`` are always the same."""
        if not self.fits(inputs):
            return self.trace(inputs, caches)
        _, call, arguments = self._bound[id(inputs)]
        result: Tensor = call(*arguments)[0]
        return result

    def fits(self, inputs: Any) -> bool:
        """Tell whether these inputs run without Dynamo."""
        if id(inputs) not in self._bound:
            graph = self._graph_of(inputs)
            if graph is None:
                return False
            self._bound[id(inputs)] = inputs, graph.call, graph.arguments.of(inputs)
        return True

    def build_kernels(self, inputs: Any) -> None:
        """Build the kernels of the ops that inputs of padding call, many at once."""
        graph = self._graph_of(inputs)
        if graph is not None and graph.kernels is not None:
            with graph.kernels.building(graph.arguments.of(inputs)):
                pass

    def _graph_of(self, inputs: Any) -> CompiledGraph | None:
        return next((graph for graph in self.graphs if graph.fits(inputs)), None)

    def trace(self, inputs: Any, caches: Any) -> Tensor:
        """Run one step through Dynamo, which traces it unless a graph of such inputs exists."""
        num_before = len(self.graphs)
        result = self._trace(inputs, caches)
        constants = constants_of(inputs)
        self.graphs[num_before:] = [
            replace(graph, constants=constants) for graph in self.graphs[num_before:]
        ]
        return result


def constants_of(inputs: Any) -> str:
    """Describe all of a step's inputs that a trace takes for constant.

    These are the structure, the leaves that are no tensors, and each tensor's dtype and rank.
    """
    leaves, structure = pytree.tree_flatten(inputs)
    kinds = [(x.dtype, x.ndim) if isinstance(x, Tensor) else x for x in leaves]
    return f"{structure} {kinds}"
