"""A graph pass: the linear layers that read one input become one op."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from torch_hybrid.graphs.passes.marks import maker
from torch_hybrid.graphs.passes.mutation import storages, written_nodes
from torch_hybrid.graphs.passes.values import linear_operands, value_of
from torch_hybrid.ops.core.capability import NO_FEATURES, Need
from torch_hybrid.ops.formats.stored_weights import features_of, group_of, has_zeros
from torch_hybrid.ops.linear.by_torch import ALIGNED
from torch_hybrid.ops.linear.op import linear, native_impl, takes_mixed

_RESHAPES = ("flatten", "reshape", "view")
_OP = torch.ops.torch_hybrid.linear.default


def merge_linears(graph: Graph, *, features: frozenset[str] = NO_FEATURES) -> None:
    """Merge the linear layers that read one input into a single ``linear`` op.

    Contract: the graph computes the same values. The op streams the weights at memory speed for the
    few rows of a decode step. The layers of one input are one parallel region, or one launch.

    Layers of weights with scales are ``linear`` ops already. Those of one dtype and group size
    become one op, together with the layers without scales if the implementation takes both.

    Nothing changes where the op has no native implementation (no compiler), nor for weights that
    the graph computes. ``features`` are those that the implementation must have.

    for each input, the F.linear nodes that read it or a reshape of its rows, up to where it is
        written in place; and those with scales that are stored alike:
        before the first: y = linear(input as rows, their weights, their biases), odd widths last
        each node becomes its columns of y, in the leading shape of what it read

    The halves of a step have different inputs: each half's layers stay its own.
    """
    siblings: dict[Node, list[_Linear]] = defaultdict(list)
    done: list[list[_Linear]] = []
    for node in graph.nodes:
        if written := storages(written_nodes(node)):
            for source in [source for source in siblings if storages([source]) & written]:
                done.append(siblings.pop(source))
        layer = _linear_of(node, features)
        if layer is not None and layer.impl is not None:
            siblings[_rows_of(layer.source)].append(layer)
    for layers in [*done, *siblings.values()]:
        for group in _groups(layers):
            _merge(graph, group)


# Storage of a weight: its dtype, how many numbers share a scale, whether there are zero points.
_Stored = tuple[torch.dtype, int, bool]


@dataclass(frozen=True, slots=True)
class _Linear:
    """Call of ``F.linear`` in a graph, or of the op with a weight that has scales."""

    node: Node
    source: Node
    weight: Node
    bias: Node | None
    scale: Node | None = None
    features: frozenset[str] = NO_FEATURES

    @property
    def stored(self) -> _Stored:
        """Storage of the weight; one launch takes layers of equal storage."""
        weight = value_of(self.weight)
        if self.scale is None:
            return weight.dtype, 0, False
        scale = value_of(self.scale)
        return weight.dtype, group_of(weight, scale), has_zeros(weight, scale)

    @property
    def impl(self) -> str | None:
        """Implementation of the op that takes the call; None if there is none.

        A plain call must have rows whose numbers are contiguous, and weights that the graph does
        not compute.
        """
        if self.scale is not None:
            return str(self.node.kwargs["impl"])
        x = value_of(self.source)
        parameters = [self.weight] if self.bias is None else [self.weight, self.bias]
        is_taken = (
            x.ndim >= 2
            and x.stride(-1) == 1
            and all(p.op in ("placeholder", "get_attr") for p in parameters)
            and all(value_of(p).is_contiguous() for p in parameters)
        )
        need = Need(device=x.device, dtype=x.dtype, features=self.features)
        return native_impl(need) if is_taken else None


def _groups(layers: Sequence[_Linear]) -> list[list[_Linear]]:
    """Group the linear layers of one input that become one op; those with scales come first."""
    by_stored: dict[_Stored, list[_Linear]] = defaultdict(list)
    for layer in layers:
        by_stored[layer.stored].append(layer)
    groups = sorted(by_stored.values(), key=lambda group: group[0].scale is None)
    first, last = groups[0][0], groups[-1][0]
    if first.scale is not None and last.scale is None:
        features = features_of(first.stored[0]) | last.features
        if takes_mixed(str(first.impl), features):
            groups[0] += groups.pop()
    return groups


def _linear_of(node: Node, features: frozenset[str]) -> _Linear | None:
    if node.target is F.linear:
        return _Linear(node, *linear_operands(node), features=features)
    scales: Any = node.kwargs.get("scales")
    if node.target is _OP and scales is not None:
        given: Any = node.args
        source, [weight], [bias] = given
        return _Linear(node, source, weight, bias, *scales)
    return None


def _rows_of(source: Node) -> Node:
    """Find the tensor that ``source`` is a reshape of, with the same rows."""
    while source.op == "call_method" and source.target in _RESHAPES:
        whole = source.all_input_nodes[0]
        x, reshaped = value_of(whole), value_of(source)
        if x.ndim < 2 or x.shape[-1] != reshaped.shape[-1] or x.dtype != reshaped.dtype:
            break
        source = whole
    return source


def _place_in_result(layer: _Linear) -> tuple[bool, bool]:
    """Order layers in an op: those with scales first, then widths that torch writes aligned."""
    return layer.scale is None, value_of(layer.node).shape[-1] % ALIGNED != 0


def _merge(graph: Graph, layers: Sequence[_Linear]) -> None:
    first_node = min(layer.node for layer in layers)
    layers = sorted(layers, key=_place_in_result)
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    options: dict[str, Any] = {"impl": layers[0].impl}
    if layers[0].scale is not None:
        if len(layers) == 1:
            return
        options["scales"] = [layer.scale for layer in layers if layer.scale is not None]
    made = maker(graph, first_node)
    with graph.inserting_before(first_node):
        rows = _rows_of(_source(first_node))
        if value_of(rows).ndim != 2:
            rows = made("reshape", rows, -1, made("size", rows, -1))
        merged = made(linear, rows, weights, biases, **options)
    first = 0
    for node in (layer.node for layer in layers):
        width, made = value_of(node).shape[-1], maker(graph, node)
        with graph.inserting_before(node):
            source = _source(node)
            columns = made("narrow", merged, 1, first, width)
            num_dims = value_of(source).ndim
            if num_dims != 2:
                leading = [made("size", source, i) for i in range(num_dims - 1)]
                columns = made("unflatten", columns, 0, leading)
        node.replace_all_uses_with(columns)
        first += width
    for layer in reversed(layers):
        graph.erase_node(layer.node)


def _source(node: Node) -> Node:
    """Find the node that a linear layer reads now; after a merge, it may be columns of another."""
    source = node.args[0] if node.args else node.kwargs["input"]
    assert isinstance(source, Node)
    return source
