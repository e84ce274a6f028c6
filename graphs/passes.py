"""Graph passes over the traced step, before Inductor: each changes one Dynamo graph in place.

``apply_passes`` lints the graph after each pass, and names the pass that broke it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from torch_hybrid.ops.capability import Need
from torch_hybrid.ops.linear.op import IMPLEMENTATIONS, linear


@dataclass(frozen=True, slots=True)
class Pass:
    """A named pass; the name switches it off and shows in reports."""

    name: str
    apply: Callable[[Graph], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """How many nodes a graph had before and after a pass."""

    name: str
    nodes_before: int
    nodes_after: int


def merge_linears(graph: Graph) -> None:
    """Give the linear layers that read one input to a single ``linear`` op.

    Contract: the graph computes the same values. On a CPU the op streams the weights at memory
    speed for the few rows of a decode step, and the layers of one input are one parallel region.
    Where the op has no native implementation (a GPU, no compiler) nothing changes.

    for each input, the F.linear nodes that read it:
        before the first: y = linear(input as rows, their weights, their biases)
        each node becomes its columns of y, in the input's leading shape
    """
    siblings: dict[Node, list[Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=F.linear):
        source = node.args[0]
        if isinstance(source, Node) and _has_native_linear(source):
            siblings[source].append(node)
    for source, nodes in siblings.items():
        _merge(graph, source, nodes)


def _has_native_linear(source: Node) -> bool:
    example: torch.Tensor = source.meta["example_value"]
    need = Need(device=example.device, dtype=example.dtype)
    return not IMPLEMENTATIONS["cpp"].capability.why_not(need)


def _merge(graph: Graph, source: Node, nodes: Sequence[Node]) -> None:
    weights = [node.args[1] for node in nodes]
    biases = [node.args[2] if len(node.args) > 2 else node.kwargs.get("bias") for node in nodes]
    num_dims = source.meta["example_value"].ndim
    with graph.inserting_before(nodes[0]):
        rows = source
        leading = [graph.call_method("size", (source, i)) for i in range(num_dims - 1)]
        if num_dims != 2:
            rows = graph.call_method(
                "reshape", (source, -1, graph.call_method("size", (source, -1)))
            )
        merged = graph.call_function(linear, (rows, weights, biases), {"impl": "cpp"})
        first = 0
        for node in nodes:
            width = node.meta["example_value"].shape[-1]
            columns = graph.call_method("narrow", (merged, 1, first, width))
            if num_dims != 2:
                columns = graph.call_method("unflatten", (columns, 0, leading))
            node.replace_all_uses_with(columns)
            first += width
    for node in reversed(nodes):
        graph.erase_node(node)


DEFAULT_PASSES: tuple[Pass, ...] = (Pass("merge_linears", merge_linears),)


def apply_passes(
    module: GraphModule, passes: Sequence[Pass], *, switched_off: Collection[str] = ()
) -> list[PassRecord]:
    """Run ``passes`` in order over a traced step.

    Raises:
        ValueError: ``switched_off`` names no pass.
        RuntimeError: a pass left a graph that does not lint.
    """
    unknown = set(switched_off) - {p.name for p in passes}
    if unknown:
        raise ValueError(
            f"no pass is named {sorted(unknown)}; there are {[p.name for p in passes]}"
        )
    records = []
    for graph_pass in passes:
        if graph_pass.name in switched_off:
            continue
        before = len(module.graph.nodes)
        graph_pass.apply(module.graph)
        try:
            module.graph.lint()
        except RuntimeError as error:
            raise RuntimeError(f"pass {graph_pass.name} broke the graph: {error}") from error
        after = len(module.graph.nodes)
        records.append(PassRecord(name=graph_pass.name, nodes_before=before, nodes_after=after))
    module.recompile()
    return records
