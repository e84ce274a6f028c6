"""Pipeline of passes over the traced step, before Inductor: each changes one Dynamo graph in place.

``apply_passes`` lints the graph after each pass, and names the pass that broke it. It also
recomputes the values (shapes, strides) that a pass has changed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Graph, GraphModule, Node

from torch_hybrid.graphs.passes.index_rotations import index_rotations
from torch_hybrid.graphs.passes.marks import half_of
from torch_hybrid.graphs.passes.merge_linears import merge_linears
from torch_hybrid.graphs.passes.narrow_products import narrow_products
from torch_hybrid.graphs.passes.own_routers import own_routers
from torch_hybrid.graphs.passes.own_top_k import own_top_k
from torch_hybrid.graphs.passes.schedule import interleave_halves
from torch_hybrid.graphs.passes.values import refresh_values


@dataclass(frozen=True, slots=True)
class Pass:
    """Graph pass with a name, which switches it off and shows in reports.

    With ``keep_text``, the graph's text before and after the pass is recorded for inspection.
    """

    name: str
    apply: Callable[[Graph], None]
    keep_text: bool = False


DEFAULT_PASSES: tuple[Pass, ...] = (
    Pass("merge_linears", merge_linears),
    Pass("interleave_halves", interleave_halves),
    Pass("own_routers", own_routers),
    Pass("own_top_k", own_top_k),
    Pass("narrow_products", narrow_products),
    Pass("index_rotations", index_rotations),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """Effect of a pass on one graph: numbers of nodes, and the graph's text if that was kept."""

    name: str
    nodes_before: int
    nodes_after: int
    text_before: str = field(default="", repr=False)
    text_after: str = field(default="", repr=False)

    def diff(self) -> str:
        """Compare the texts: lines that the pass removed, added or moved; "" without texts."""
        before, after = self.text_before.splitlines(), self.text_after.splitlines()
        lines = difflib.unified_diff(before, after, "before", self.name, n=1, lineterm="")
        return "\n".join(lines)


def without(passes: Sequence[Pass], switched_off: Collection[str]) -> tuple[Pass, ...]:
    """Drop the passes whose names are in ``switched_off``.

    Raises:
        ValueError: ``switched_off`` names no pass.
    """
    names = [graph_pass.name for graph_pass in passes]
    unknown = sorted(set(switched_off) - set(names))
    if unknown:
        raise ValueError(f"no pass is named {unknown}; there are {names}")
    return tuple(graph_pass for graph_pass in passes if graph_pass.name not in switched_off)


def with_text(passes: Sequence[Pass], name: str) -> tuple[Pass, ...]:
    """Make the pass of this name keep the text of each graph."""
    return tuple(replace(p, keep_text=True) if p.name == name else p for p in passes)


def apply_passes(module: GraphModule, passes: Sequence[Pass]) -> list[PassRecord]:
    """Run ``passes`` in order over a traced step.

    Args:
        module: changed in place.
        passes: each gets the module's graph.

    Raises:
        RuntimeError: a pass refused the graph, or left one that does not lint.
    """

    records = []
    for graph_pass in passes:

        def text(is_kept: bool = graph_pass.keep_text) -> str:
            return graph_text(module.graph) if is_kept else ""

        num_before, text_before = len(module.graph.nodes), text()
        try:
            graph_pass.apply(module.graph)
        except RuntimeError as error:
            raise RuntimeError(f"pass {graph_pass.name} failed: {error}") from error
        try:
            module.graph.lint()
        except RuntimeError as error:
            raise RuntimeError(f"pass {graph_pass.name} broke the graph: {error}") from error
        refresh_values(module.graph)
        records.append(
            PassRecord(
                name=graph_pass.name,
                nodes_before=num_before,
                nodes_after=len(module.graph.nodes),
                text_before=text_before,
                text_after=text(),
            )
        )
    module.recompile()
    return records


def graph_text(graph: Graph) -> str:
    """Write one line for each call of a graph; its half ("a" or "b") stands in front."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    return "\n".join(map(_line, nodes))


def _line(node: Node) -> str:
    half = {None: " ", 0: "a", 1: "b"}[half_of(node)]
    target = node.target if isinstance(node.target, str) else node._pretty_print_target(node.target)
    arguments = [*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())]
    return f"{half} {node.name} = {target}({', '.join(arguments)})"
