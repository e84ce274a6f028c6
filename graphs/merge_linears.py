"""A graph pass: the linear layers that read one input become one op."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from torch_hybrid.graphs.marks import keep_marks
from torch_hybrid.graphs.mutation import storages, written_nodes
from torch_hybrid.ops.capability import Need
from torch_hybrid.ops.linear.op import IMPLEMENTATIONS, linear


def merge_linears(graph: Graph) -> None:
    """Give the linear layers that read one input to a single ``linear`` op.

    Contract: the graph computes the same values. On a CPU the op streams the weights at memory
    speed for the few rows of a decode step, and the layers of one input are one parallel region.
    Where the op has no native implementation (a GPU, no compiler), and for weights that are
    computed in the graph, nothing changes.

    for each input, the F.linear nodes that read it, up to where it is written in place:
        before the first: y = linear(input as rows, their weights, their biases)
        each node becomes its columns of y, in the input's leading shape

    The halves of a step have different inputs: each half's layers stay its own.
    """
    siblings: dict[Node, list[_Linear]] = defaultdict(list)
    groups: list[list[_Linear]] = []
    for node in graph.nodes:
        if written := storages(written_nodes(node)):
            for source in [x for x in siblings if storages([x]) & written]:
                groups.append(siblings.pop(source))
        if node.target is F.linear:
            layer = _Linear(node, *_operands(*node.args, **node.kwargs))
            if layer.is_native():
                siblings[layer.source].append(layer)
    for group in [*groups, *siblings.values()]:
        _merge(graph, group)


@dataclass(frozen=True, slots=True)
class _Linear:
    """A call of ``F.linear`` in a graph."""

    node: Node
    source: Node
    weight: Node
    bias: Node | None

    def is_native(self) -> bool:
        """Whether the op takes it: rows of a plain input, weights that are there from the start."""
        x = _example(self.source)
        parameters = [self.weight] if self.bias is None else [self.weight, self.bias]
        need = Need(device=x.device, dtype=x.dtype)
        return (
            x.ndim >= 2
            and x.stride(-1) == 1
            and all(p.op in ("placeholder", "get_attr") for p in parameters)
            and all(_example(p).is_contiguous() for p in parameters)
            and not IMPLEMENTATIONS["cpp"].capability.why_not(need)
        )


def _operands(
    input: Node, weight: Node, bias: Node | None = None
) -> tuple[Node, Node, Node | None]:
    """The arguments of ``F.linear``, whether passed by position or by name."""
    return input, weight, bias


def _example(node: Node) -> torch.Tensor:
    example: torch.Tensor = node.meta["example_value"]
    return example


def _merge(graph: Graph, layers: Sequence[_Linear]) -> None:
    first_node = layers[0].node
    # The source as it is now: where it was a merged layer itself, columns stand in its place.
    source, *_ = _operands(*first_node.args, **first_node.kwargs)  # type: ignore[arg-type]
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    num_dims = _example(layers[0].source).ndim
    made: list[Node] = []

    def method(name: str, *args: Any) -> Node:
        made.append(graph.call_method(name, args))
        return made[-1]

    with graph.inserting_before(first_node):
        rows = source
        leading = [method("size", source, i) for i in range(num_dims - 1)]
        if num_dims != 2:
            rows = method("reshape", source, -1, method("size", source, -1))
        merged = graph.call_function(linear, (rows, weights, biases), {"impl": "cpp"})
        made.append(merged)
        first = 0
        for layer in layers:
            width = _example(layer.node).shape[-1]
            columns = method("narrow", merged, 1, first, width)
            if num_dims != 2:
                columns = method("unflatten", columns, 0, leading)
            layer.node.replace_all_uses_with(columns)
            first += width
    for node in made:
        keep_marks(node, first_node)
    for layer in reversed(layers):
        graph.erase_node(layer.node)
