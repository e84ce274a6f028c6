"""Interleaved halves of a step: while one half waits, the other computes.

Contract of the pass ``interleave_halves``: it permutes the nodes of a graph and changes nothing
else. Every node is there once. The nodes of a half keep their order, and so do the reads and writes
of every pool. The order of collectives follows from the graph alone, so it is the same on every
rank. A graph that cannot be scheduled so is an error; one without halves stays as it is.

    sizes alone                         -> first
    nodes of half 0, nodes of half 1    -> cut into stages, both alike:
        after each start of a collective (its wait begins a later stage); where there is none,
        where matrix products and mixers (attention, recurrences) take turns;
        nowhere between two uses of one pool
    stages of half 0: a0 a1 a2, of half 1: b0 b1 b2
        offset 0: a0 b0 a1 b1 a2 b2     what one half started beside what the other computes
        offset 1: a0 a1 b0 a2 b1 b2     a mixer of one beside a matrix product of the other
    the rest                            -> last
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from torch_hybrid.graphs.passes.marks import clear_marks, half_of, set_stage, stage_of
from torch_hybrid.graphs.passes.mutation import storages, written_nodes
from torch_hybrid.ops.core.registration import NAMESPACE
from torch_hybrid.ops.linear.op import linear
from torch_hybrid.ops.top_k.op import TOP_K

HALVES = (0, 1)
_COLLECTIVES = "_c10d_functional"
_MATRIX_FUNCTIONS: set[Callable[..., object]] = {
    F.linear,
    F.bilinear,
    operator.matmul,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.einsum,
    linear,
}
_MATRIX_METHODS = {"matmul", "mm", "bmm", "addmm", "__matmul__"}
_SIZE_METHODS = {"size", "stride", "numel", "dim", "storage_offset"}
_MATRIX_OPS = {"linear", "head_linear", "fused_experts", "expert_linear"}


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage of one half: a stretch of its nodes.

    Attributes:
        half: 0 or 1.
        index: number of the stage in its half.
        ops: ops that take time of their own, in order.
    """

    half: int
    index: int
    ops: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the stage: "a0", "a1", ... in the first half, "b0", "b1", ... in the second."""
        return f"{'ab'[self.half]}{self.index}"

    @property
    def work(self) -> str:
        """Ops as text: "2 linear, paged_attention"."""
        runs = ((op, len(list(same))) for op, same in groupby(self.ops))
        return ", ".join(f"{count} {op}" if count > 1 else op for op, count in runs) or "-"

    def __str__(self) -> str:
        return f"{self.name:<4} {'':{40 * self.half}}{self.work}"


def interleave_halves(graph: Graph, *, offset: int | None = None) -> None:
    """Run the stages of both halves in turn; see the module's docstring for the contract.

    Args:
        graph: graph of a step whose halves are marked with ``marks.in_half``.
        offset: number of stages by which the second half lags. None is 0 if stages end with starts
            of asynchronous ops, else 1.

    Raises:
        RuntimeError: the halves differ, or the contract cannot be kept.
    """
    nodes = list(graph.nodes)
    if all(half_of(node) is None for node in nodes):
        return
    sizes = sizes_alone(nodes)
    halves = [[n for n in nodes if half_of(n) == k and n not in sizes] for k in HALVES]
    shared = pools_of(nodes)
    has_starts = any(is_collective_start(node) for half in halves for node in half)
    stages = [_cut(half, shared, has_starts) for half in halves]
    _check_alike(stages)
    if offset is None:
        offset = 0 if has_starts else 1
    interleaved = [node for stage in _in_turn(stages, offset) for node in stage]
    halved = set(interleaved)
    first, last = _around(nodes, halved)
    order = [*first, *interleaved, *last]
    _check(nodes, order, shared)
    for half in stages:
        for index, stage in enumerate(half):
            for node in stage:
                set_stage(node, index)
    _unmark_shared(order)
    _permute(order)


def read_schedule(graph: Graph) -> tuple[Stage, ...]:
    """Read the stages of a scheduled graph in the order in which they run; none without halves."""
    placed = [(half_of(n), stage_of(n), heavy_op(n)) for n in graph.nodes]
    stages = []
    for (half, index), part in groupby((p for p in placed if p[1] is not None), lambda p: p[:2]):
        stages.append(Stage(half, index, tuple(op for _, _, op in part if op)))  # type: ignore[arg-type]
    return tuple(stages)


def heavy_op(node: Node) -> str | None:
    """Name an op that takes time of its own: matrix product, mixer, collective or wait."""
    name = _op_name(node)
    if _is_matrix_product(node):
        return name.rpartition(".")[2]
    return name.partition(".")[2] if name.startswith((NAMESPACE, _COLLECTIVES)) else None


def opaque_ops(graph: Graph) -> list[str]:
    """List the ops that Inductor calls as they are, such as "torch_hybrid.linear", in order."""
    names = ["torch_hybrid.linear" if n.target is linear else _op_name(n) for n in graph.nodes]
    return [name for name in names if name.startswith((f"{NAMESPACE}.", f"{_COLLECTIVES}."))]


def _op_name(node: Node) -> str:
    """Name a function; an op of this package is "torch_hybrid.paged_attention", for example."""
    if isinstance(node.target, OpOverload):
        return str(node.target.overloadpacket)
    if callable(node.target) and not isinstance(node.target, OpOverloadPacket):
        return node.target.__name__
    return str(node.target)


def _is_matrix_product(node: Node) -> bool:
    if node.op == "call_method":
        return node.target in _MATRIX_METHODS
    namespace, _, name = _op_name(node).partition(".")
    return node.target in _MATRIX_FUNCTIONS or (namespace == NAMESPACE and name in _MATRIX_OPS)


def _is_mixer(node: Node) -> bool:
    is_ours = node.op == "call_function" and _op_name(node).startswith(f"{NAMESPACE}.")
    is_attention = node.target is F.scaled_dot_product_attention
    is_other = _is_matrix_product(node) or node.target is TOP_K
    return is_attention or (is_ours and not is_other)


def is_collective_start(node: Node) -> bool:
    """Tell whether a node starts a collective, which a later node waits for."""
    namespace, _, name = _op_name(node).partition(".")
    return namespace == _COLLECTIVES and name != "wait_tensor"


def _last_mixers(half: Sequence[Node]) -> list[int]:
    """Find the places of the last mixer op before each matrix product."""
    found: list[int] = []
    last: int | None = None
    for i, node in enumerate(half):
        if _is_mixer(node):
            last = i
        elif last is not None and _is_matrix_product(node):
            found.append(last)
            last = None
    return found


def sizes_alone(nodes: Sequence[Node]) -> set[Node]:
    """Find the nodes that compute sizes from sizes; Dynamo makes each once, for both halves."""
    sizes: set[Node] = set()
    for node in nodes:
        values = pytree.tree_leaves(node.meta.get("example_value"))
        if any(isinstance(value, Tensor) for value in values):
            continue
        inputs = node.all_input_nodes
        if node.op == "placeholder" or (inputs and sizes.issuperset(inputs)):
            sizes.add(node)
    return sizes


def pools_of(nodes: Sequence[Node]) -> set[int]:
    """Find the pools: storages of the step's inputs that some node writes."""
    inputs = storages(node for node in nodes if node.op in ("placeholder", "get_attr"))
    written: set[int] = storages(w for node in nodes for w in written_nodes(node))
    return inputs & written


def uses_of(node: Node, shared: set[int]) -> set[int]:
    """Find the pools that a node reads or writes; reading a size is neither."""
    if node.op == "call_method" and node.target in _SIZE_METHODS:
        return set()
    return storages(node.all_input_nodes) & shared


def _cut(half: Sequence[Node], shared: set[int], after_starts: bool) -> list[list[Node]]:
    """Cut a half's nodes into stages, in order."""
    after = [i + 1 for i, node in enumerate(half) if is_collective_start(node)]
    cuts = after if after_starts else _between_kinds(half)
    inside = _inside(half, shared)
    allowed = [cut for cut in cuts if cut not in inside]
    return [list(half[i:j]) for i, j in zip([0, *allowed], [*allowed, len(half)], strict=True)]


def _between_kinds(half: Sequence[Node]) -> list[int]:
    """Find the cuts around runs of mixer ops that lie between matrix products.

    A cut stands before the first mixer op after a product, and after the last one before the next
    product. Norms and gates between these belong to the products: Inductor fuses them there.
    """
    cuts = [last + 1 for last in _last_mixers(half)]
    in_mixer = False
    for i, node in enumerate(half):
        if _is_mixer(node) and not in_mixer:
            cuts.append(i)
        in_mixer = (in_mixer or _is_mixer(node)) and not _is_matrix_product(node)
    return sorted(cut for cut in cuts if cut > 0)


def _inside(half: Sequence[Node], shared: set[int]) -> set[int]:
    """Find the places where no cut may be: between two uses of one pool, and inside a context."""
    uses: dict[int, list[int]] = {}
    for i, node in enumerate(half):
        for storage in uses_of(node, shared):
            uses.setdefault(storage, []).append(i)
    inside = {cut for at in uses.values() for cut in range(at[0] + 1, at[-1] + 1)}
    depth = 0
    for i, node in enumerate(half):
        if depth:
            inside.add(i)
        depth += (node.target is _enter_autocast) - (node.target is _exit_autocast)
    return inside


def _in_turn(stages: Sequence[list[list[Node]]], offset: int) -> list[list[Node]]:
    """Order the stages: a0 .. a[offset] b0 a[offset + 1] b1 ..."""
    first, second = stages
    turns: list[list[Node]] = []
    for i in range(len(first) + offset):
        turns += [first[i]] if i < len(first) else []
        turns += [second[i - offset]] if offset <= i else []
    return turns


def _around(nodes: Sequence[Node], halved: set[Node]) -> tuple[list[Node], list[Node]]:
    """Split the nodes of the whole step into those that need no value of a half, and the others."""
    after: set[Node] = set()
    for node in nodes:
        if node not in halved and any(n in halved or n in after for n in node.all_input_nodes):
            after.add(node)
    output = [node for node in nodes if node.op == "output"]
    last = [node for node in nodes if node in after and node.op != "output"]
    first = [n for n in nodes if n not in halved and n not in after and n.op != "output"]
    return first, last + output


def _unmark_shared(nodes: Sequence[Node]) -> None:
    """Clear the marks of nodes that both halves compute alike, from weights and sizes.

    Functionalization makes one node of the two. As part of one half, it could not be fused with
    nodes of the other.
    """
    users = {n: {half_of(user) for user in n.users} for n in nodes if n.op == "placeholder"}
    shared = {n for n, halves in users.items() if halves != {0} and halves != {1}}
    for node in nodes:
        if half_of(node) is None or not shared.issuperset(node.all_input_nodes):
            continue
        if not written_nodes(node) and heavy_op(node) is None:
            shared.add(node)
            clear_marks(node)


def _permute(order: Sequence[Node]) -> None:
    *body, output = order
    for node in body:
        output.prepend(node)


def _check_alike(stages: Sequence[list[list[Node]]]) -> None:
    first, second = (
        [[op for node in stage if (op := heavy_op(node))] for stage in half] for half in stages
    )
    if first != second:
        raise RuntimeError(
            f"the halves of the step must run the same stages, got {first} and {second}"
        )


def _check(before: Sequence[Node], after: Sequence[Node], shared: set[int]) -> None:
    """Raise unless ``after`` is ``before`` in another order that keeps the contract."""
    if len(after) != len(before) or set(after) != set(before):
        raise RuntimeError("the schedule must have every node once")
    place = {node: i for i, node in enumerate(after)}
    for node in after:
        for source in node.all_input_nodes:
            if place[source] > place[node]:
                raise RuntimeError(
                    f"{node.name} of half {half_of(node)} needs {source.name} of half "
                    f"{half_of(source)}, which is scheduled after it"
                )
    users_of: dict[int, list[Node]] = {}
    for node in before:
        for storage in uses_of(node, shared):
            users_of.setdefault(storage, []).append(node)
    for users in users_of.values():
        if sorted(users, key=place.__getitem__) != users:
            names = [node.name for node in sorted(users, key=place.__getitem__)]
            raise RuntimeError(f"the uses of a pool changed their order, to {names}")
