"""Copies of traced layers, by which a step traced with its first layers gets all of them.

Contract of ``instantiate``: the graph is, node by node, the one that a trace of all layers gives. A
layer that cannot be copied so is refused with the reason; the graph must then be discarded.

    for each time that the model is called (each half of a step):
        nodes of layer 0, 1, ... P - 1      traced
        layers of one kind                  -> must give the same calls, on their own tensors
        for each layer from P on:
            template = the last traced layer of its kind, and not layer 0
            copy the template's nodes behind the last layer, where
                the template's own tensor           -> this layer's tensor of that name
                a value of the layer before it      -> that of the layer before this one, which is
                                                       told from others by its shape and dtype
                a value of the whole step           -> itself
                anything else                       -> refused
        readers of a value of layer P - 1   -> read that of the last layer
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from torch_hybrid.graphs.passes.marks import clear_layer, layer_of, set_layer
from torch_hybrid.graphs.passes.mutation import written_nodes
from torch_hybrid.graphs.passes.schedule import sizes_alone

_NOT_CALLS = ("placeholder", "get_attr", "output")


class CannotCopy(RuntimeError):
    """Reason why all layers of a model must be traced."""


class UnseenValues(CannotCopy):
    """Ambiguity of the last traced layer's outputs: no other traced layer shows which they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Layers of a model.

    Attributes:
        names: path of each layer in the model.
        kinds: number of each layer's kind.
        tensors: tensors of each layer, by a name that is the same in each layer of its kind.
    """

    names: tuple[str, ...]
    kinds: tuple[int, ...]
    tensors: tuple[Mapping[str, Tensor], ...]


def own_copy(module: GraphModule) -> GraphModule:
    """Copy a graph to change it: Dynamo reads its own graph's placeholders again later."""
    graph = Graph()
    result = graph.graph_copy(module.graph, {})
    graph.output(result)
    return GraphModule(module, graph)


def drop_dead_checks(graph: Graph) -> None:
    """Remove the comparisons of sizes that a trace leaves and no node reads."""
    plain = (bool, int, torch.SymBool, torch.SymInt)
    for node in reversed(graph.nodes):
        is_size = isinstance(node.meta.get("example_value"), plain)
        if node.op.startswith("call_") and not node.users and is_size:
            graph.erase_node(node)


def mark_layers(graph: Graph, names: Sequence[str]) -> None:
    """Mark each call of a traced graph with the layer that made it."""
    number = {name: index for index, name in enumerate(names)}
    pattern = re.compile(rf"\.({'|'.join(map(re.escape, names))})(?:\.|$)")
    for node in graph.nodes:
        if node.op in _NOT_CALLS:
            continue  # an input is made where it is first used
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            if found := pattern.search(path):
                set_layer(node, number[found[1]])
                break
    # A trace computes each size once: a size that another layer reads too belongs to the step.
    sizes = sizes_alone(list(graph.nodes))
    for node in reversed(graph.nodes):
        if node in sizes and any(layer_of(user) != layer_of(node) for user in node.users):
            clear_layer(node)


def instantiate(module: GraphModule, layers: Layers, num_traced: int) -> list[Tensor]:
    """Add the layers that were not traced to a graph of the first ones.

    Args:
        module: changed in place; its calls have ``mark_layers``' marks.
        layers: all layers of the model.
        num_traced: number of layers in the graph.

    Returns:
        The tensors of the graph's new placeholders, which come after its own.

    Raises:
        CannotCopy: values between layers look alike, a layer reads a foreign value, or layers of
            one kind differ.
    """
    drop_dead_checks(module.graph)
    tensors = _LayerTensors(module.graph, layers)
    for run in _runs(module.graph, num_traced):
        copier = _Copier(module.graph, layers, tensors, run)
        copier.check_alike()
        copier.copy()
    module.graph.lint()
    return tensors.added  # the passes, which come next, write the module's code


class _LayerTensors:
    """Placeholders of a graph that stand for tensors of layers."""

    def __init__(self, graph: Graph, layers: Layers) -> None:
        self._graph, self._layers = graph, layers
        self._last = list(graph.find_nodes(op="placeholder"))[-1]
        names: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for index, own in enumerate(layers.tensors):
            for name, tensor in own.items():
                names[id(tensor)].append((index, name))
        self._node_of: dict[int, Node] = {}  # by the tensor's id
        self._names_of: dict[Node, list[tuple[int, str]]] = {}
        self._fake_mode: FakeTensorMode | None = None
        self.added: list[Tensor] = []
        for node in graph.find_nodes(op="placeholder"):
            fake = node.meta.get("example_value")
            if not isinstance(fake, FakeTensor):
                continue
            self._fake_mode = fake.fake_mode
            tensor = node.meta["grapharg"].example
            self._node_of[id(tensor)] = node
            if id(tensor) in names:
                self._names_of[node] = names[id(tensor)]

    def names(self, node: Node, layer: int) -> list[str] | None:
        """Name the tensor of a node as ``layer`` does; None if the tensor belongs to no layer.

        Raises:
            CannotCopy: the tensor belongs to another layer.
        """
        if node not in self._names_of:
            return None
        own = [name for index, name in self._names_of[node] if index == layer]
        if not own:
            index, name = self._names_of[node][0]
            raise CannotCopy(f"layer {layer} reads {name} of layer {index}")
        return own

    def like(self, node: Node, template: int, layer: int) -> Node:
        """Find the node of that tensor of ``layer`` which corresponds to a node of ``template``."""
        own = self.names(node, template)
        if own is None:
            return node
        meant = {id(t): t for t in (self._layers.tensors[layer][name] for name in own)}
        if len(meant) > 1:
            raise CannotCopy(f"{' and '.join(own)} are one tensor in layer {template} alone")
        [tensor] = meant.values()
        if id(tensor) not in self._node_of:
            self._node_of[id(tensor)] = self._add(tensor, node)
        return self._node_of[id(tensor)]

    def _add(self, tensor: Tensor, like: Node) -> Node:
        if not all(isinstance(size, int) for size in like.meta["example_value"].shape):
            raise CannotCopy(f"{like.name} must have a static shape")
        assert self._fake_mode is not None
        with self._graph.inserting_after(self._last):
            node: Node = self._graph.placeholder(f"of_copied_layers_{len(self.added)}")
        fake = self._fake_mode.from_tensor(tensor, static_shapes=True)
        node.meta = {"example_value": fake}
        self.added.append(tensor)
        self._last = node
        return node


def _runs(graph: Graph, num_traced: int) -> list[list[list[Node]]]:
    """Collect the nodes of each layer, for each time that the model is called."""
    runs: list[list[list[Node]]] = []
    current: int | None = None
    for node in graph.nodes:
        layer = layer_of(node)
        if layer is None:
            continue
        if layer == 0 and current != 0:
            runs.append([])
        if layer != current:
            if not runs or layer != len(runs[-1]):
                raise CannotCopy(f"layers must come in turn, got {layer} after {current}")
            runs[-1].append([])
        current = layer
        runs[-1][-1].append(node)
    counts = list(map(len, runs))
    if not runs or set(counts) != {num_traced}:
        raise CannotCopy(f"each call of the model must have {num_traced} layers, got {counts}")
    return runs


class _Copier:
    """Copier of the layers in one call of the model."""

    def __init__(
        self, graph: Graph, layers: Layers, tensors: _LayerTensors, run: list[list[Node]]
    ) -> None:
        self._graph, self._layers, self._tensors, self._run = graph, layers, tensors, run
        self._layer = {node: index for index, nodes in enumerate(run) for node in nodes}
        _check_nothing_between(run)
        self._templates = {kind: i for i, kind in enumerate(layers.kinds[: len(run)]) if i}
        self._results = self._all_results()

    def check_alike(self) -> None:
        """Raise CannotCopy unless layers of one kind make the same calls."""
        first: dict[int, int] = {}  # of each kind
        calls = [self._calls(index) for index in range(1, len(self._run))]
        for index in range(1, len(self._run)):
            one = first.setdefault(self._layers.kinds[index], index)
            for (op, text), (own_op, own_text) in zip_longest(
                calls[one - 1], calls[index - 1], fillvalue=(None, "nothing")
            ):
                if (op, text) != (own_op, own_text):
                    raise CannotCopy(
                        f"layers {one} and {index} look alike, and one calls {text} where the "
                        f"other calls {own_text}"
                    )

    def _all_results(self) -> list[list[Node]]:
        """List the values of each layer that others read, in one order."""
        results = [_results(nodes) for nodes in self._run]
        *before, last = results
        if before and len(last) < len(before[-1]):
            # A next layer would read more of them: an earlier layer of this kind shows which.
            kinds, index = self._layers.kinds, len(before)
            like = next((i for i in range(index - 1, 0, -1) if kinds[i] == kinds[index]), None)
            if like is None or len(self._run[like]) != len(self._run[index]):
                raise UnseenValues(f"no layer like {index} shows which values it gives")
            places = [self._run[like].index(node) for node in results[like]]
            results[-1] = [self._run[index][place] for place in places]
        _check_told_apart(results)
        return results

    def copy(self) -> None:
        """Append the layers that were not traced."""
        last, point = self._results[-1], self._run[-1][-1]
        readers = [[user for user in node.users if user not in self._layer] for node in last]
        previous = last
        for index in range(len(self._run), len(self._layers.kinds)):
            template = self._templates[self._layers.kinds[index]]
            new = dict(zip(self._results[template - 1], previous, strict=True))
            for node in self._run[template]:
                for source in node.all_input_nodes:
                    if source not in new:
                        new[source] = self._shared(source, template, index)
                with self._graph.inserting_after(point):
                    point = new[node] = self._graph.node_copy(node, new.__getitem__)
                self._mark(point, template, index)
            previous = [new[node] for node in self._results[template]]
        for node, users, own in zip(last, readers, previous, strict=True):
            for user in users:
                user.replace_input_with(node, own)

    def _shared(self, source: Node, template: int, index: int) -> Node:
        """Find the node that a copy reads in the place of one outside its template."""
        if source in self._layer:
            raise CannotCopy(f"layer {template} reads {source} of layer {self._layer[source]}")
        return self._tensors.like(source, template, index)

    def _mark(self, node: Node, template: int, index: int) -> None:
        set_layer(node, index)
        name, own = self._layers.names[template], self._layers.names[index]
        path = re.compile(rf"\.{re.escape(name)}(?=\.|$)")
        node.meta["nn_module_stack"] = {
            f"{key}@{index}": (path.sub(f".{own}", text, count=1), module)
            for key, (text, module) in node.meta.get("nn_module_stack", {}).items()
        }

    def _calls(self, index: int) -> list[tuple[object, str]]:
        """List the calls of a layer: op and text; tensors stand by name and values by number."""
        before = self._results[index - 1]
        names = {node: f"value {i} of the layer before" for i, node in enumerate(before)}
        calls: list[tuple[object, str]] = []

        def name(node: Node) -> Named:
            if node not in names:
                own = self._tensors.names(node, index)
                names[node] = node.name if own is None else own[0]
            return Named(names[node])

        for number, node in enumerate(self._run[index]):
            args, kwargs = map_arg((node.args, node.kwargs), name)  # type: ignore[arg-type]
            given = [*map(repr, args), *(f"{key}={value}" for key, value in kwargs.items())]
            op = node.target if node.op == "call_method" else node._pretty_print_target(node.target)
            calls.append((node.target, f"{op}({', '.join(given)})"))
            names[node] = f"%{number}"
        if not {i for n in self._run[index] for i in n.all_input_nodes} >= set(before):
            raise CannotCopy(f"layer {index} does not read all values of layer {index - 1}")
        return calls


class Named:
    """Node that prints as a given name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def _results(layer: Sequence[Node]) -> list[Node]:
    """List the values of a layer that others read, ordered by shape and dtype."""
    inside = set(layer)
    read = [node for node in layer if any(user not in inside for user in node.users)]
    return sorted(read, key=_shown)


def _check_told_apart(results: Sequence[Sequence[Node]]) -> None:
    """Raise CannotCopy unless all layers give the same values, and no two of a layer look alike."""
    for index, own in enumerate(results):
        if not own or len({_shown(node) for node in own}) < len(own):
            raise CannotCopy(f"layer {index} must give values of different shapes, got {own}")
        if len(own) > 1 and [*map(_shown, own)] != [*map(_shown, results[0])]:
            raise CannotCopy(f"layers 0 and {index} give other values: {results[0]} and {own}")


def _shown(node: Node) -> str:
    value = node.meta.get("example_value")
    return f"{value.dtype} {[*value.shape]}" if isinstance(value, Tensor) else repr(value)


def _check_nothing_between(run: Sequence[Sequence[Node]]) -> None:
    """Raise CannotCopy if a node between layers reads their values, or writes.

    It would have to be copied too, but belongs to no layer.
    """
    inside = {node for nodes in run for node in nodes}
    reached: set[Node] = set()
    for node in _between(run[0][0], run[-1][-1]):
        if node in inside:
            reached.add(node)
        elif not reached.isdisjoint(node.all_input_nodes) or written_nodes(node):
            raise CannotCopy(f"{node} stands between layers and is part of none")


def _between(first: Node, last: Node) -> Iterable[Node]:
    node = first
    while node is not last:
        if node.op not in _NOT_CALLS:
            yield node
        node = node.next
    yield last
