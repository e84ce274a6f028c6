"""Writes of nodes in a Dynamo graph, and the storages that they touch."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch._ops import OpOverload
from torch.fx import Node
from torch.utils import _pytree as pytree

from torch_hybrid.graphs.passes.values import storages_of

_IN_PLACE = {
    operator.setitem,
    *(getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "pow", "matmul")),
}


def storages(nodes: Iterable[Node]) -> set[int]:
    """Collect the storages behind the values of ``nodes``; views of one tensor share it."""
    return storages_of([node.meta.get("example_value") for node in nodes])


def written_nodes(node: Node) -> list[Node]:
    """Find the arguments that ``node`` writes to.

    These are ``x`` in ``x.add_(y)``, ``x += y``, ``x[0] = y`` and ``out=x``, and those that an op's
    schema declares.
    """
    written: list[object] = [node.kwargs.get("out")]
    if isinstance(node.target, OpOverload):
        for i, argument in enumerate(node.target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
                written.append(given)
    elif node.target in _IN_PLACE or _is_in_place_method(node) or node.kwargs.get("inplace"):
        written += node.args[:1]
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, Node)]


def _is_in_place_method(node: Node) -> bool:
    name = str(node.target)
    return node.op == "call_method" and name.endswith("_") and not name.endswith("__")
