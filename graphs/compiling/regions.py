"""Regions of a step: each distinct one is compiled once, and called wherever it occurs.

Contract: the regions one after the other are the graph. A region has no weight, pool or plan of its
own; all of these are its inputs. Two regions are equal if only their tensors differ.

    cut a plain step after the last opaque op of each layer, and the views of its result:
        that result is in memory in any case, so that no fusion is lost; between layers the
        residual's sum would part from the norm
    cut a scheduled step between its stages, over which nothing is fused:
        a stage of one half is then the same region as that of the other
    cut nowhere inside a context (autocast), nor between an op and the parts of its result
    for each region:
        views of what Inductor computed in another are made anew in it: it returns a view in the
        order of its strides, but not with the strides that were traced
        key = its calls with nodes numbered, and which of them are of one half and stage;
              shapes, strides, dtypes and aliases of its inputs as expressions of the step's sizes;
              which values are read outside
    compile each key once
    the step = one Python function that calls them in turn, and drops each value after its last use
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from torch_hybrid.graphs.compiling.instantiate import Named
from torch_hybrid.graphs.passes.marks import half_of, keep_marks, layer_of, other_marks, stage_of
from torch_hybrid.graphs.passes.mutation import storages, written_nodes
from torch_hybrid.graphs.passes.values import value_of
from torch_hybrid.ops.linear.op import linear

# A compiled region takes the list of its inputs, which it may empty, and gives its outputs.
Compiled = Callable[[list[Any]], Sequence[Any]]
_VIEWS = {"narrow", "unflatten", "view", "reshape", "size", getitem}


def cut(graph: Graph) -> list[list[Node]]:
    """Cut the calls of a graph into regions, in order: one region if no layers are known."""
    _parts_with_results(graph)
    nodes = [node for node in graph.nodes if node.op.startswith("call_")]
    is_scheduled = any(stage_of(node) is not None for node in nodes)
    ends = _between_stages(nodes) if is_scheduled else _after_layers(nodes)
    allowed = sorted(set(ends) - _inside_contexts(nodes) - {0, len(nodes)})
    pieces = [nodes[a:b] for a, b in pairwise([0, *allowed, len(nodes)]) if a < b]
    return _make_views_anew(pieces)


def _after_layers(nodes: Sequence[Node]) -> list[int]:
    """Find the places behind the last opaque op of each layer, of each half."""
    last: dict[tuple[int | None, int], int] = {}
    for place, node in enumerate(nodes):
        layer = layer_of(node)
        if layer is not None and _is_opaque(node):
            last[half_of(node), layer] = place
    return [_past_views(nodes, place) + 1 for place in last.values()]


def _between_stages(nodes: Sequence[Node]) -> list[int]:
    """Find the places where a stage of either half begins; other nodes join what is before them."""
    places: list[int] = []
    current: tuple[int | None, int] | None = None
    for place, node in enumerate(nodes):
        stage = stage_of(node)
        if stage is not None and (half_of(node), stage) != current:
            current = half_of(node), stage
            places.append(place)
    return places


def _is_opaque(node: Node) -> bool:
    """Tell whether Inductor calls a node's op as it is, so that the result goes to memory."""
    target = node.target
    if isinstance(target, OpOverload):
        return target.namespace not in ("aten", "prims")
    return target is F.linear or target is linear


def _parts_with_results(graph: Graph) -> None:
    """Move the parts of an op's result directly behind it: only tensors pass between regions."""
    for node in graph.nodes:
        parts = [n for n in node.users if n.target is getitem and n.args[0] is node]
        if parts and not isinstance(value_of(node), Tensor):
            for part in reversed(parts):
                node.append(part)
                keep_marks(part, node)


def _make_views_anew(regions: Sequence[list[Node]]) -> list[list[Node]]:
    """Give each region its own views of other regions' values, and drop views that nobody reads.

    The result of an opaque op passes between regions as it is, and so do views of it.
    """
    home = {node: nodes for nodes in regions for node in nodes}
    made = [_own_views(nodes, home) for nodes in regions]
    for node in sorted({source for own in made for source in own}, reverse=True):
        if not node.users:
            home[node].remove(node)
            node.graph.erase_node(node)
    grown = [[*own.values(), *nodes] for own, nodes in zip(made, regions, strict=True)]
    return [nodes for nodes in grown if nodes]


def _own_views(nodes: Sequence[Node], home: Mapping[Node, list[Node]]) -> dict[Node, Node]:
    """Copy, before a region's ``nodes``, the views that they read of other regions' values."""
    own: dict[Node, Node] = {}
    graph, first = nodes[0].graph, nodes[0]

    def view(source: Node) -> Node:
        if home.get(source, nodes) is nodes or not _is_view_of_computed(source):
            return source
        if source not in own:
            with graph.inserting_before(first):
                own[source] = graph.node_copy(source, view)
            keep_marks(own[source], first)
        return own[source]

    for node in nodes:
        node.args, node.kwargs = map_arg((node.args, node.kwargs), view)  # type: ignore[arg-type, assignment, misc]
    return own


def _is_view_of_computed(node: Node) -> bool:
    """Tell whether a node is a view of a value whose layout Inductor chooses."""
    memory, is_view = storages([node]), False
    while source := next((n for n in node.all_input_nodes if memory & storages([n])), None):
        if written_nodes(node) or not source.op.startswith("call_"):
            return False
        if _is_opaque(source):
            return source.target is F.linear
        node, is_view = source, is_view or isinstance(value_of(source), Tensor)
    return is_view


def _past_views(nodes: Sequence[Node], place: int) -> int:
    """Find the last of the views behind an op; the sizes of these views are known there."""
    while place + 1 < len(nodes) and nodes[place + 1].target in _VIEWS:
        place += 1
    return place


def _inside_contexts(nodes: Sequence[Node]) -> set[int]:
    """Find the places that lie inside an open context."""
    inside: set[int] = set()
    depth = 0
    for place, node in enumerate(nodes):
        if depth:
            inside.add(place)
        depth += (node.target is _enter_autocast) - (node.target is _exit_autocast)
    return inside


class Region:
    """Consecutive calls of a graph, with the values that they read from outside and give to it.

    Attributes:
        nodes: the calls.
        constants: ``get_attr`` nodes that they read.
        inputs: values that they read, in the order of their first use, then the sizes in shapes.
        outputs: values that other nodes read, in the order of the calls.
    """

    def __init__(self, nodes: Sequence[Node], sizes: Mapping[Any, Node]) -> None:
        inside = set(nodes)
        read = dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside)
        self.nodes = nodes
        self.constants = [node for node in read if node.op == "get_attr"]
        self.inputs = [node for node in read if node.op != "get_attr"]
        self.outputs = [n for n in nodes if any(user not in inside for user in n.users)]
        given = {value_of(node).node.expr for node in self.inputs if _is_size(node)}
        values = [*map(value_of, self.inputs), *(n.meta.get("example_value") for n in nodes)]
        needed = {size for value in values for size in _symbols(value)}
        missing = [sizes[s] for s in sorted(needed - given, key=str) if s in sizes]
        self.inputs += [node for node in missing if node not in self.inputs]

    def key(self) -> object:
        """Compute a key that is equal for regions that differ only in their input tensors."""
        number = {node: i for i, node in enumerate([*self.inputs, *self.nodes])}
        names = {node: f"%{i}" for node, i in number.items()}
        names |= {node: str(node.target) for node in self.constants}

        marks = relative_marks(self.nodes)

        def call(node: Node) -> object:
            given = map_arg((node.args, node.kwargs), lambda n: Named(names[n]))  # type: ignore[arg-type, return-value]
            return node.op, node.target, str(given), marks[node]

        storages: dict[int, int] = {}

        def place(node: Node) -> object:
            fake = value_of(node)
            if not isinstance(fake, Tensor):
                return str(fake)
            shared = storages.setdefault(fake.untyped_storage()._cdata, number[node])
            layout = str((*fake.shape, "by", *fake.stride(), "from", fake.storage_offset()))
            return layout, fake.dtype, str(fake.device), shared

        return (
            tuple(map(call, self.nodes)),
            tuple(map(place, self.inputs)),
            tuple(number[node] for node in self.outputs),
        )

    def module(self, root: torch.nn.Module) -> GraphModule:
        """Copy the calls into a graph of their own; ``root`` has the constants."""
        graph, new = Graph(), {}
        for node in self.inputs:
            new[node] = graph.placeholder(node.name)
            value_of(node)
            new[node].meta = {k: v for k, v in node.meta.items() if k != "grapharg"}
        for node in [*self.constants, *self.nodes]:
            new[node] = graph.node_copy(node, new.__getitem__)
        graph.output(tuple(new[node] for node in self.outputs))
        return GraphModule(root, graph)


def relative_marks(nodes: Sequence[Node]) -> dict[Node, object]:
    """Number the half and stage of each node relative to the first of ``nodes`` that has one.

    The halves swap places from one region to the next: only which nodes share a stage of one half
    matters. Other marks count as they are.
    """
    halves: dict[int | None, int] = {None: -1}
    first: dict[int | None, int] = {}
    marks: dict[Node, object] = {}
    for node in nodes:
        half, stage = half_of(node), stage_of(node)
        behind = None if stage is None else stage - first.setdefault(half, stage)
        marks[node] = halves.setdefault(half, len(halves) - 1), behind, str(other_marks(node))
    return marks


def _is_size(node: Node) -> bool:
    return isinstance(value_of(node), torch.SymInt)


def _symbols(fake: Any) -> set[Any]:
    """Collect the symbols in a value's shape and strides."""
    if isinstance(fake, torch.SymInt):
        return set(fake.node.expr.free_symbols)
    if not isinstance(fake, Tensor):
        return set()
    return {
        s
        for n in (*fake.shape, *fake.stride())
        if isinstance(n, torch.SymInt)
        for s in n.node.expr.free_symbols
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    """Regions of a graph: the distinct ones, and the number of the one at each place."""

    regions: tuple[Region, ...]  # the region at each place
    numbers: tuple[int, ...]  # index into ``distinct``, at each place
    distinct: tuple[Region, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of calls of each distinct region."""
        return tuple(map(self.numbers.count, range(len(self.distinct))))


def plan_regions(graph: Graph) -> RegionPlan:
    """Cut a graph into regions, and find the equal ones."""
    placeholders = graph.find_nodes(op="placeholder")
    sizes = {value_of(node).node.expr: node for node in placeholders if _is_size(node)}
    regions = [Region(nodes, sizes) for nodes in cut(graph)]
    known: dict[object, int] = {}
    numbers = [known.setdefault(region.key(), len(known)) for region in regions]
    first = dict(zip(reversed(numbers), reversed(regions), strict=True))
    return RegionPlan(
        regions=tuple(regions),
        numbers=tuple(numbers),
        distinct=tuple(first[number] for number in range(len(known))),
    )


def step_text(graph: Graph, plan: RegionPlan) -> str:
    """Write the step as Python: ``step(a0, a1, ...)`` calls its regions ``f0``, ``f1``, ... in
    turn.

    The arguments are the graph's placeholders.
    """
    placeholders = list(graph.find_nodes(op="placeholder"))
    made = {node for region in plan.regions for node in region.outputs}
    names = {node: f"a{i}" for i, node in enumerate(placeholders)}
    names |= {n: f"v{i}" for i, n in enumerate(n for r in plan.regions for n in r.outputs)}
    output = graph.output_node()
    last: dict[Node, int] = {}
    for place, region in enumerate(plan.regions):
        last |= dict.fromkeys(region.inputs, place)
    last |= dict.fromkeys(output.all_input_nodes, len(plan.regions))
    lines = [f"def step({', '.join(names[node] for node in placeholders)}):"]
    for place, (number, region) in enumerate(zip(plan.numbers, plan.regions, strict=True)):
        # Only the list holds a region's values then, and the region frees each as early as it can.
        lines.append(f"    boxed = [{', '.join(names[node] for node in region.inputs)}]")
        done = [names[n] for n in region.inputs if n in made and last[n] == place]
        lines += [f"    del {', '.join(done)}"] if done else []
        results = "".join(f"{names[node]}, " for node in region.outputs)
        lines.append(f"    {results + '= ' if results else ''}f{number}(boxed)")
    result = map_arg(output.args[0], lambda n: Named(names[n]))  # type: ignore[arg-type, return-value]
    return "\n".join([*lines, f"    return {result}"])


def link(text: str, compiled: Sequence[Compiled]) -> Callable[..., Sequence[Any]]:
    """Build the function of a ``step_text`` over its compiled regions."""
    scope: dict[str, Any] = {f"f{i}": function for i, function in enumerate(compiled)}
    exec(text, scope)
    step: Callable[..., Sequence[Any]] = scope["step"]
    return step
