"""A graph pass: the mixers of a step in halves go to a second CUDA stream.

A mixer (attention, a recurrence) is bound by memory, a matrix product by arithmetic. On one device,
the halves of a step can hide one behind the other.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from torch_hybrid.graphs.passes.marks import half_of, keep_marks
from torch_hybrid.graphs.passes.schedule import (
    HALVES,
    is_collective_start,
    last_mixers,
    pools_of,
    uses_of,
)
from torch_hybrid.ops.core.registration import NAMESPACE
from torch_hybrid.ops.core.side_stream import OVERLOAD, join_side_stream


def mixers_on_side_stream(graph: Graph, *, devices: Collection[str] = ("cuda",)) -> None:
    """Start the mixers of both halves on the side stream.

    Contract: the graph computes the same values. A step without halves stays as it is, and so does
    one with collectives: there the halves hide these.

    in each half, for the last mixer op before each matrix product:
        y = op(...)  ->  y = op.on_side_stream(...); join_side_stream(y)
    where no op that stays on the main stream uses one of its pools

    ``interleave_halves`` ends a stage between the two.

    Args:
        graph: graph of a step whose halves are marked with ``marks.in_half``.
        devices: types of the devices on which the pass runs. Others have one stream, on which the
            two ops would run in turn.
    """
    halves = [[node for node in graph.nodes if half_of(node) == k] for k in HALVES]
    if any(is_collective_start(node) for half in halves for node in half):
        return
    mixers = [half[i] for half in halves for i in last_mixers(half)]
    chosen = [mixer for mixer in mixers if _has_result(mixer) and _device(mixer) in devices]
    for mixer in _with_pools_of_their_own(graph, chosen):
        _start_beside(graph, mixer)


def _has_result(node: Node) -> bool:
    """Tell whether a node is an op of this package that returns something to wait for."""
    op = node.target
    return isinstance(op, OpOverload) and op.namespace == NAMESPACE and bool(op._schema.returns)


def _device(node: Node) -> str:
    """Read the type of the device of a node's tensors."""
    values = pytree.tree_leaves([n.meta.get("example_value") for n in node.all_input_nodes])
    return next(value.device.type for value in values if isinstance(value, Tensor))


def _with_pools_of_their_own(graph: Graph, chosen: Sequence[Node]) -> Sequence[Node]:
    """Select the nodes of ``chosen`` whose pools no other node uses."""
    pools = pools_of(list(graph.nodes))
    while True:
        others = [n for n in graph.nodes if n not in chosen and n.op != "placeholder"]
        taken = set().union(*(uses_of(node, pools) for node in others))
        kept = [mixer for mixer in chosen if not uses_of(mixer, pools) & taken]
        if len(kept) == len(chosen):
            return kept
        chosen = kept


def _start_beside(graph: Graph, mixer: Node) -> None:
    mixer.target = getattr(mixer.target.overloadpacket, OVERLOAD)  # type: ignore[union-attr]
    results = [user for user in mixer.users if user.target is operator.getitem] or [mixer]
    with graph.inserting_after(results[-1]):
        join = graph.call_function(join_side_stream, (results,))
    keep_marks(join, mixer)
