"""A compiled step runs without Dynamo.

Dynamo looks up a graph's arguments at every call, and compares all that the graph was traced for.
The steps of a runner differ in nothing but sizes. So a graph keeps what it is called on, and the
sizes that it holds for are compared once for each bucket of inputs.

    tensors of the model and its pools:  those that were traced, for good
    tensors and sizes of the inputs:     where they stand there, "inputs.rows.size()[0]"
    sizes that no graph holds for:       traced by Dynamo, which gives one more graph
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

from torch_hybrid.graphs.compiling.compile_region import CompiledRegion
from torch_hybrid.graphs.passes.values import value_of

INPUTS = "inputs"  # a step's argument, of which all that changes from step to step is part
_TRACED_INPUTS = f"L['{INPUTS}']"  # as Dynamo writes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What a graph is called on.

    Attributes:
        given: for each argument the tensor that it is at every step, or where it stands in the
            inputs.
        shapes: of each tensor of the inputs, by where it stands: a number or where the same size
            stands, and None for what follows from other sizes.
        sizes: where the sizes stand that ``holds`` is about.
        holds: an expression over ``sizes``, for which the graph holds; empty for any.
        unknown: an argument that Dynamo alone finds: it calls such a graph.
    """

    given: tuple[Tensor | str, ...]
    sizes: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int | str | None, ...]] = field(default_factory=dict)
    holds: str = ""
    unknown: str = ""

    def fit(self, inputs: Any) -> bool:
        """Whether the graph may be called on ``inputs``."""
        if self.unknown:
            return False
        sizes = {place: _at(place, inputs) for place in self.sizes}
        for place, shape in self.shapes.items():
            for size, wanted in zip(_at(place, inputs).shape, shape, strict=True):
                expected = sizes[wanted] if isinstance(wanted, str) else wanted
                if expected is not None and size != expected:
                    return False
        if not self.holds:
            return True
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        # A graph of any size from 2 on computes the same of one row: what Dynamo takes for true of
        # 2 and not of 1 is how tensors lie in memory, and that sizes are not broadcast.
        several = [max(size, 2) for size in sizes.values()]
        return bool(ShapeEnv().evaluate_guards_expression(self.holds, several))

    def of(self, inputs: Any) -> list[Any]:
        """The arguments of a step of these inputs."""
        return [_at(x, inputs) if isinstance(x, str) else x for x in self.given]


def arguments_of(graph: Graph, added: Sequence[Tensor]) -> Arguments:
    """What a graph that Dynamo traced and that is compiled already is called on.

    Args:
        graph: of which the last placeholders stand for the tensors ``added``.
        added: which Dynamo does not know.
    """
    placeholders = graph.find_nodes(op="placeholder")
    traced = placeholders[: len(placeholders) - len(added)]
    given: list[Tensor | str] = []
    unknown = ""
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
            given.append(place)
            unknown = f"{place} is no tensor, and no part of the step's inputs"
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
        unknown=unknown,
    )


def _size(size: int | torch.SymInt, places: Mapping[str, str]) -> int | str | None:
    return size if isinstance(size, int) else places.get(str(size))


def _guards(sizes: Iterable[torch.SymInt]) -> str:
    """What was taken for true of sizes while a graph was traced and compiled."""
    sizes = list(sizes)
    if not sizes:
        return ""
    return sizes[0].node.shape_env.produce_guards_expression(sizes) or ""


def _at(place: str, inputs: Any) -> Any:
    return eval(place, {INPUTS: inputs})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGraph:
    """What a graph was compiled to.

    Attributes:
        arguments: what it is called on.
        call: returns the graph's outputs.
        text: of ``call``, which calls the regions in turn; see ``regions.step_text``.
        regions: the distinct ones.
        counts: how often each is called.
        ops: of all calls, "op[impl]" to number of calls.
        constants: of the inputs that it was traced with; see ``constants_of``.
    """

    arguments: Arguments
    call: Callable[..., Sequence[Any]]
    text: str = ""
    regions: tuple[CompiledRegion, ...] = ()
    counts: tuple[int, ...] = ()
    ops: Counter[str] = field(default_factory=Counter)
    constants: str = ""

    def fits(self, inputs: Any) -> bool:
        """Whether the graph may be called on these inputs."""
        return self.constants == constants_of(inputs) and self.arguments.fit(inputs)

    def call_of_traced(self, *given: Any) -> Sequence[Any]:
        """Call it on those arguments that Dynamo knows: those of copied layers come after them."""
        return self.call(*given, *self.arguments.given[len(given) :])


class CompiledStep:
    """Runs a step from its graphs, and has Dynamo trace it for inputs that none fits.

    Args:
        trace: ``trace(inputs, caches)`` runs the step by Dynamo, which puts what it traces into
            ``graphs``.
        graphs: of the step, so far.
    """

    def __init__(self, trace: Callable[[Any, Any], Tensor], graphs: list[CompiledGraph]) -> None:
        self._trace, self.graphs = trace, graphs
        # By the identity of the inputs, which are kept alive: they are as many as buckets.
        self._bound: dict[int, tuple[Any, Callable[..., Sequence[Any]], list[Any]]] = {}

    def __call__(self, inputs: Any, caches: Any) -> Tensor:
        """One step; ``inputs`` are tensors at fixed addresses, and ``caches`` always the same."""
        bound = self._bound.get(id(inputs))
        if bound is None:
            graph = next((graph for graph in self.graphs if graph.fits(inputs)), None)
            if graph is None:
                return self.trace(inputs, caches)
            bound = self._bound[id(inputs)] = inputs, graph.call, graph.arguments.of(inputs)
        _, call, arguments = bound
        result: Tensor = call(*arguments)[0]
        return result

    def trace(self, inputs: Any, caches: Any) -> Tensor:
        """One step by Dynamo, which traces it unless it has a graph for such inputs."""
        num_before = len(self.graphs)
        result = self._trace(inputs, caches)
        constants = constants_of(inputs)
        self.graphs[num_before:] = [
            replace(graph, constants=constants) for graph in self.graphs[num_before:]
        ]
        return result


def constants_of(inputs: Any) -> str:
    """All of a step's inputs that a trace takes for constant: their structure, what is in it that
    is no tensor, and the kinds of those."""
    leaves, structure = pytree.tree_flatten(inputs)
    kinds = [(x.dtype, x.ndim) if isinstance(x, Tensor) else x for x in leaves]
    return f"{structure} {kinds}"
