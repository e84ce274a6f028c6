"""Batch-invariant sums over a row: the same bits in every graph and for every number of rows.

Inductor's graphs each sum in another order, and torch's order depends on sizes. A pass replaces
these sums in graphs; ``own_sums`` replaces torch's functions as an eager model calls them. On a
CPU, sums have one order without this.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.graphs.passes.marks import keep_marks
from torch_hybrid.graphs.passes.mutation import storages, written_nodes
from torch_hybrid.graphs.passes.own_functions import Replacements
from torch_hybrid.graphs.passes.row_arithmetic import FEW, FUNCTIONS, RowArithmetic
from torch_hybrid.graphs.passes.values import called_name, value_of

DEVICES = ("cuda",)
# Other sums, which occur in no model's step.
_REFUSED = {
    *("batch_norm", "cdist", "cosine_similarity", "cumprod", "cumsum", "dist", "group_norm"),
    *("histc", "index_add", "index_add_", "index_reduce", "index_reduce_", "instance_norm"),
    *("linalg_norm", "logcumsumexp", "nanmean", "nansum", "native_layer_norm", "normalize"),
    *("pairwise_distance", "prod", "renorm", "scatter_add", "scatter_add_", "scatter_reduce"),
    *("scatter_reduce_", "segment_reduce", "softmin", "std", "std_mean", "trace", "var"),
    *("var_mean", "vector_norm"),
}


def row_sums(graph: Graph, *, impl: str = "triton", devices: Collection[str] = DEVICES) -> None:
    """Write each sum over a row as one with a fixed order.

    Contract: the graph computes the same values, up to rounding. Each sum over a row has the same
    bits in every graph. This pass is the last: others recognize the functions that models call.

    for each sum, mean, norm, softmax, logsumexp along one dim:
        write it with sums in a fixed order (``RowArithmetic``)
        for a sum of squares of x: read x itself, before its cast to float32
            where x = a + b (the residual stream): read a and b; x is computed where it is used
    any other sum is refused

    Args:
        graph: graph of a step.
        impl: implementation of the op ``power_sum``.
        devices: types of the devices on which the pass runs.
    """
    written = storages(w for node in graph.nodes for w in written_nodes(node))
    for node in list(graph.nodes):
        name = called_name(node)
        if name not in FUNCTIONS and name not in _REFUSED:
            continue
        x = node.args[0] if node.args else node.kwargs.get("input")
        if not isinstance(x, Node) or not _is_summed_by_us(value_of(x), devices):
            continue
        _check(name)
        _replace(graph, node, x, impl, written)


def _replace(graph: Graph, node: Node, x: Node, impl: str, written: set[int]) -> None:
    """Put sums in a fixed order in the place of a call, whose first argument is ``x``."""
    value = value_of(x)
    squared: tuple[Node, ...] = ()
    tracer = GraphAppendingTracer(graph)
    if called_name(node) in ("sum", "mean") and value.shape[-1] > FEW:
        squared = _squared(x, written)
    arithmetic = RowArithmetic(
        like=value,
        impl=impl,
        power=2 if squared else 1,
        addend=Proxy(squared[1], tracer) if squared[1:] else None,
    )
    before = node.prev

    def read(given: Node) -> Any:
        return Proxy(squared[0] if given is x and squared else given, tracer)

    args, kwargs = map_arg((node.args, node.kwargs), read)  # type: ignore[arg-type]
    with graph.inserting_before(node):
        made: Any = FUNCTIONS[called_name(node)](arithmetic, *args, **kwargs)
    new = before.next
    while new is not node:
        keep_marks(new, node)
        new = new.next
    node.replace_all_uses_with(made.node)
    graph.erase_node(node)
    if squared and not x.users:
        graph.erase_node(x)


def _squared(x: Node, written: set[int]) -> tuple[Node, ...]:
    """Find the tensor that ``x`` is the square of, before its cast to float32.

    Returns:
        That tensor, or the two tensors that it is the sum of. Nothing if ``x`` is no square, or if
        the graph writes to the tensor.
    """
    is_square = (called_name(x) == "pow" and x.args[1:] == (2,)) or called_name(x) == "square"
    is_product = x.target is operator.mul and len(set(x.args)) == 1
    if value_of(x).dtype != torch.float32 or not (is_square or is_product):
        return ()
    [source] = x.all_input_nodes
    if called_name(source) in ("to", "float") and len(source.all_input_nodes) == 1:
        [narrow] = source.all_input_nodes
        is_exact = value_of(narrow).dtype in (torch.bfloat16, torch.float16, torch.float32)
        source = narrow if is_exact and not storages([narrow]) & written else source
    return () if storages([source]) & written else _addends(source, written) or (source,)


def _addends(x: Node, written: set[int]) -> tuple[Node, ...]:
    """Find the two tensors of x's shape and dtype that ``x`` is the sum of; else nothing."""
    if called_name(x) != "add" or x.kwargs or len(x.args) != 2:
        return ()
    terms = tuple(each for each in x.args if isinstance(each, Node) and _is_like(each, x))
    return terms if len(terms) == 2 and not storages(terms) & written else ()


def _is_like(a: Node, b: Node) -> bool:
    x, y = value_of(a), value_of(b)
    return isinstance(x, Tensor) and x.dtype == y.dtype and tuple(x.shape) == tuple(y.shape)


def _is_summed_by_us(x: Any, devices: Collection[str]) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.device.type in devices


def _check(name: str) -> None:
    if name in _REFUSED:
        raise UnsupportedError(
            f"batch_invariant: the model calls {name}, whose order of additions depends on the "
            "graph"
        )


def own_sums(impl: str = "triton", devices: Collection[str] = DEVICES) -> Replacements:
    """Make the replacements that do the work of ``row_sums`` for a model that runs as it is."""

    def summed(func: Any, *args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if args else kwargs.get("input")
        if not _is_summed_by_us(x, devices):
            return func(*args, **kwargs)
        _check(func.__name__)
        return FUNCTIONS[func.__name__](RowArithmetic(like=x, impl=impl), *args, **kwargs)

    return dict.fromkeys((*FUNCTIONS, *_REFUSED), summed)
