"""A graph pass: rotary embeddings swap the halves of a head by an index, without a copy."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch.fx import Graph, Node

from torch_hybrid.graphs.passes.marks import maker
from torch_hybrid.graphs.passes.values import value_of

aten = torch.ops.aten


def index_rotations(graph: Graph, *, devices: Collection[str] = ("cuda",)) -> None:
    """Write ``rotate_half`` without a ``cat``.

    Contract: the graph computes the same values. Inductor's GPU kernels read each part of a ``cat``
    under a mask, element by element; halves in reverse order are only another index.

    for each cat of -x[..., n:] and x[..., :n], n half of x's last dim:
        x as two rows of n, in reverse order, times -1 and 1; in x's shape

    Args:
        graph: graph of a step.
        devices: types of the devices on which the pass runs. A CPU takes as long either way.
    """
    for node in list(graph.nodes):
        x = _rotated(node)
        if x is not None and value_of(x).device.type in devices:
            _replace(graph, node, x)


def _rotated(node: Node) -> Node | None:
    """Find the x of which a node is ``rotate_half``; None if it is something else."""
    if node.target is not torch.cat:
        return None
    parts, dim = _operands(*node.args, **node.kwargs)  # type: ignore[arg-type]
    if isinstance(parts, Node) or len(parts) != 2 or dim not in (-1, value_of(node).ndim - 1):
        return None
    negated, lower = parts
    if negated.target is not operator.neg:
        return None
    [upper] = negated.all_input_nodes
    if not upper.target is lower.target is operator.getitem or upper.args[0] is not lower.args[0]:
        return None
    x = lower.args[0]
    assert isinstance(x, Node)
    size = value_of(node).shape[-1]
    if not isinstance(size, int) or value_of(x).shape[-1] != size:
        return None
    half = size // 2
    halves = (..., slice(half, None, None)), (..., slice(None, half, None))
    return x if (upper.args[1], lower.args[1]) == halves else None


def _operands(
    tensors: Sequence[Node] | Node, dim: int = 0, **_: object
) -> tuple[Sequence[Node] | Node, int]:
    """Pick the arguments of ``cat`` that matter, whether passed by position or by name."""
    return tensors, dim


def _replace(graph: Graph, node: Node, x: Node) -> None:
    device, fake_mode, made = value_of(x).device, value_of(x).fake_mode, maker(graph, node)
    with graph.inserting_before(node):
        signs = made(aten.arange.start_step, -1, 2, 2, dtype=torch.int64, device=device)
        with fake_mode:  # the call's arguments have no fake mode
            signs.meta["example_value"] = torch.arange(-1, 2, 2, dtype=torch.int64, device=device)
        swapped = made("flip", made("unflatten", x, -1, (2, -1)), -2)
        rotated = made("mul", swapped, made("unsqueeze", signs, -1))
        flat = made("flatten", rotated, -2)
    node.replace_all_uses_with(flat)
    graph.erase_node(node)
