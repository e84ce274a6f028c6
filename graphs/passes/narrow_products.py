"""A graph pass: products of small matrices, as residual streams are mixed, become sums."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from torch_hybrid.graphs.passes.marks import maker
from torch_hybrid.graphs.passes.values import value_of

_MOST = 8  # rows, and terms of a sum
_PRODUCTS = (torch.matmul, operator.matmul, "matmul")


def narrow_products(graph: Graph, *, devices: Collection[str] = ("cpu",)) -> None:
    """Write products of many small matrices out, term by term.

    Contract: the graph computes the same values, up to rounding. For so small matrices a library is
    bound by memory, and it stores the result. The sum fuses with its neighbours instead.

    for each matmul of [..., M, K] by [..., K, N], M up to 8 and K from 2 to 8:
        left[..., 0, None] * right[..., 0, None, :] + left[..., 1, None] * ...

    Args:
        graph: graph of a step.
        devices: types of the devices on which the pass runs: those where it was measured to be
            faster.
    """
    for node in list(graph.nodes):
        num_terms = _num_terms(node)
        if num_terms is not None and value_of(node).device.type in devices:
            _write_out(graph, node, num_terms)


def _num_terms(node: Node) -> int | None:
    """Count the terms of each element of a narrow product; None if a node is something else."""
    if node.target not in _PRODUCTS or len(node.args) != 2:
        return None
    operands = [value_of(arg) for arg in node.args if isinstance(arg, Node)]
    return int(operands[0].shape[-1]) if is_narrow(operands) else None


def is_narrow(operands: Sequence[Any]) -> bool:
    """Tell whether operands are batches of matrices of a few rows and terms."""
    if any(not isinstance(x, Tensor) or x.dim() < 3 for x in operands) or len(operands) != 2:
        return False
    num_rows, num_terms = operands[0].shape[-2:]
    are_few = all(isinstance(n, int) and n <= _MOST for n in (num_rows, num_terms))
    return are_few and num_terms > 1 and operands[0].is_floating_point()


def _write_out(graph: Graph, node: Node, num_terms: int) -> None:
    (left, right), made = node.args, maker(graph, node)

    def term(number: int) -> Node:
        column = made("unsqueeze", made("select", left, -1, number), -1)
        row = made("unsqueeze", made("select", right, -2, number), -2)
        return made(operator.mul, column, row)

    with graph.inserting_before(node):
        total = term(0)
        for number in range(1, num_terms):
            total = made(operator.add, total, term(number))
    node.replace_all_uses_with(total)
    graph.erase_node(node)
