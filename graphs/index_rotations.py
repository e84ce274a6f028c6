"""A graph pass: the halves that rotary embeddings swap are read in place."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from torch_hybrid.graphs.marks import keep_marks
from torch_hybrid.graphs.values import value_of


def index_rotations(graph: Graph) -> None:
    """Write ``rotate_half`` without a ``cat``.

    Contract: the graph computes the same bits. Inductor reads each part of a ``cat`` under a mask,
    number by number; halves in reverse order are only another index.

    for each cat of -x[..., n:] and x[..., :n], n half of x's last dim:
        swapped = x as two rows of n, in reverse order
        where(first row, -swapped, swapped), in x's shape
    """
    for node in list(graph.nodes):
        if (x := _rotated(node)) is not None:
            _replace(graph, node, x)


def _rotated(node: Node) -> Node | None:
    """The x of which a node is ``rotate_half``, if it is one."""
    if node.target is not torch.cat:
        return None
    parts, dim = _operands(*node.args, **node.kwargs)  # type: ignore[arg-type]
    if len(parts) != 2 or dim not in (-1, value_of(node).ndim - 1):
        return None
    negated, lower = parts
    if negated.target not in (operator.neg, torch.neg, "neg"):
        return None
    [upper] = negated.all_input_nodes
    if not upper.target is lower.target is operator.getitem or upper.args[0] is not lower.args[0]:
        return None
    x = lower.args[0]
    assert isinstance(x, Node)
    size = value_of(node).shape[-1]
    is_whole = isinstance(size, int) and size % 2 == 0 and value_of(x).shape[-1] == size
    halves = (..., slice(None, size // 2, None)), (..., slice(size // 2, None, None))
    return x if is_whole and (lower.args[1], upper.args[1]) == halves else None


def _operands(tensors: list[Node], dim: int = 0) -> tuple[list[Node], int]:
    """The arguments of ``cat``, whether passed by position or by name."""
    return tensors, dim


def _replace(graph: Graph, node: Node, x: Node) -> None:
    def call(target: Callable[..., Any] | str, *args: object, **options: Any) -> Node:
        make = graph.call_method if isinstance(target, str) else graph.call_function
        made: Node = make(target, args, options)
        keep_marks(made, node)
        return made

    like = value_of(x)
    with graph.inserting_before(node):
        row = call(torch.arange, 2, device=like.device)
        with like.fake_mode:  # of no input that has one
            row.meta["example_value"] = torch.arange(2, device=like.device)
        is_first = call(operator.eq, call("unsqueeze", row, -1), 0)
        swapped = call("flip", call("unflatten", x, -1, (2, -1)), -2)
        rotated = call(torch.where, is_first, call(operator.neg, swapped), swapped)
        flat = call("flatten", rotated, -2)
    node.replace_all_uses_with(flat)
    graph.erase_node(node)
