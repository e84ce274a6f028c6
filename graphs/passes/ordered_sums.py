"""Sums over the ranks in the order of the ranks.

A collective begins each part of a tensor with another rank, so that a row's bits depend on the
number of rows. Here every rank receives all parts and adds them up itself. That is R / 2 times the
traffic of a ring of R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph

from torch_hybrid.graphs.passes.marks import maker
from torch_hybrid.graphs.passes.own_functions import Replacements
from torch_hybrid.ranks import add_up

_all_reduce = torch.ops._c10d_functional.all_reduce
_gather = torch.ops._c10d_functional.all_gather_into_tensor
_wait = torch.ops._c10d_functional.wait_tensor


def ordered_sums(graph: Graph, *, num_ranks: int) -> None:
    """Replace each sum over the ranks by a gather of the parts and a sum in the order of the ranks.

    Contract: the graph computes the same values, up to rounding.

    for each all_reduce that sums, and its wait:
        gather the parts; wait; add them up, the first rank's first
    """
    for node in list(graph.nodes):
        if not is_sum(node.target, node.args):
            continue
        part, _, group = node.args
        made = maker(graph, node)
        with graph.inserting_before(node):
            gathered = made(_gather, made("contiguous", part), num_ranks, group)
        for wait in list(node.users):
            made = maker(graph, wait)
            with graph.inserting_before(wait):
                total = made(add_up, made("unflatten", made(_wait, gathered), 0, (num_ranks, -1)))
            wait.replace_all_uses_with(total)
            graph.erase_node(wait)
        graph.erase_node(node)


def sums_in_order(num_ranks: int) -> Replacements:
    """Make the replacements that do the work of ``ordered_sums`` for a model that runs as it is.

    Args:
        num_ranks: number of ranks that share the model.
    """

    def reduced(func: Any, *args: Any) -> Any:
        if not is_sum(func, args):
            return func(*args)
        part, _, group = args
        parts = _wait(_gather(part.contiguous(), num_ranks, group))
        return add_up(parts.unflatten(0, (num_ranks, -1)))  # a later wait returns it at once

    return dict.fromkeys((_all_reduce, _all_reduce.default), reduced)


def is_sum(target: object, args: Sequence[Any]) -> bool:
    """Tell whether a call sums over the ranks."""
    return target in (_all_reduce, _all_reduce.default) and args[1] == "sum"
