"""Values of a step's nodes during compilation: shape, strides, dtype and memory.

Dynamo stores them with the nodes that it traced. A pass stores none with the nodes that it makes.
Nodes that read these may be views of a tensor that has other strides now.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

_VALUE = "example_value"


def value_of(node: Node) -> Any:
    """Read a node's fake value; compute it if a pass has left none."""
    if _VALUE not in node.meta:
        node.meta[_VALUE] = _computed(node)
    return node.meta[_VALUE]


def linear_operands(node: Node) -> tuple[Node, Node, Node | None]:
    """Read the input, weight and bias of ``F.linear``, whether passed by position or by name."""
    given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    return x, weight, bias  # type: ignore[return-value]


def called_name(node: Node) -> str:
    """Read the name of the function or method that a node calls; "" if it calls none."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def refresh_values(graph: Graph) -> None:
    """Compute the values of nodes that a pass made, and of later nodes whose values these change.

    A later node changes if it reads other strides, or is a view of a tensor that the pass removed.
    """
    changed: set[Node] = set()
    replaced: set[int] = set()  # storages whose nodes are gone
    for node in graph.nodes:
        if not node.op.startswith("call_") or not _reads_values(node):
            continue
        old = node.meta.get(_VALUE)
        is_new = _VALUE not in node.meta
        if (
            not is_new
            and changed.isdisjoint(node.all_input_nodes)
            and not replaced & storages_of(old)
        ):
            continue
        node.meta[_VALUE] = _computed(node)
        if is_new or _layouts(node.meta[_VALUE]) != _layouts(old):
            changed.add(node)
        replaced |= storages_of(old) - storages_of(node.meta[_VALUE])


def _reads_values(node: Node) -> bool:
    """Tell whether a node is a call on tensors or sizes; a call that opens a context is not."""
    given = pytree.tree_leaves([source.meta.get(_VALUE) for source in node.all_input_nodes])
    return any(isinstance(value, Tensor | torch.SymInt) for value in given)


def _computed(node: Node) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), value_of)  # type: ignore[arg-type]
    given = pytree.tree_leaves((args, kwargs))
    modes = [value.fake_mode for value in given if isinstance(value, FakeTensor)]
    with modes[0] if modes else nullcontext(), torch.no_grad():
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)  # type: ignore[index]
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _layouts(value: Any) -> list[object]:
    return [
        (str((*leaf.shape, *leaf.stride(), leaf.storage_offset())), leaf.dtype, leaf.device)
        if isinstance(leaf, Tensor)
        else str(leaf)
        for leaf in pytree.tree_leaves(value)
    ]


def storages_of(value: Any) -> set[int]:
    """Collect the storages behind the tensors of a value; views of one tensor share it."""
    leaves = pytree.tree_leaves(value)
    return {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)}
