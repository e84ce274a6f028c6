"""Batch-invariant products: each row has the same bits, whatever other rows a step has.

Torch's own products add up in an order that depends on the number of rows. A pass replaces them in
graphs; for a model that runs eagerly, ``in_rows`` replaces torch's functions as it calls them.
Functions of single elements also differ there: torch computes the last elements of a tensor, and of
each thread's share, one by one, and the others in vectors.

``row_sums`` does the same for sums over a row, ``ordered_sums`` for sums over ranks, and
``own_top_k`` for the best of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.graphs.passes.marks import maker
from torch_hybrid.graphs.passes.narrow_products import is_narrow
from torch_hybrid.graphs.passes.ordered_sums import sums_in_order
from torch_hybrid.graphs.passes.own_functions import Replacements, with_own_functions
from torch_hybrid.graphs.passes.own_linears import by_rows
from torch_hybrid.graphs.passes.own_top_k import OWN_TOP_K
from torch_hybrid.graphs.passes.row_sums import own_sums
from torch_hybrid.graphs.passes.values import called_name, linear_operands, value_of
from torch_hybrid.ops.linear.op import linear

# Products of whole tensors: their rows would depend on one another.
_PRODUCTS = {
    *("addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "chain_matmul", "einsum", "matmul"),
    *("__matmul__", "__rmatmul__", "mm", "mv", "scaled_dot_product_attention", "tensordot"),
    *("conv1d", "conv2d", "conv3d"),
}
# Functions of single elements that torch's vector code rounds otherwise than its scalar code.
_ELEMENTWISE = {
    *("cos", "elu", "erf", "exp", "exp2", "expm1", "gelu", "log", "log1p", "log2", "logsigmoid"),
    *("mish", "sigmoid", "silu", "sin", "softplus", "tanh"),
}
_VECTOR = 64  # a multiple of the elements that any vector loop takes at once
_STRETCH = 16384  # most elements that torch computes in one thread
_BLOCKS = 4096  # a multiple of the elements that any of torch's GPU kernels gives a block


def row_products(graph: Graph, *, impl: str) -> None:
    """Replace each ``F.linear`` of a graph by the op ``linear``.

    Contract: the graph computes the same values, up to rounding; each row of a product is computed
    by itself.

    for each F.linear:
        linear(input as rows, [weight], [bias])
    any other product of whole tensors is refused
    """
    for node in graph.nodes:
        if node.target is F.linear:
            _replace(graph, node, impl)
        elif (name := called_name(node)) in _PRODUCTS:
            operands = [value_of(each) for each in node.all_input_nodes]
            _check_product(name, [x for x in operands if isinstance(x, Tensor)])


def _replace(graph: Graph, node: Node, impl: str) -> None:
    """Put the op in the place of one F.linear."""

    made = maker(graph, node)
    x, weight, bias = linear_operands(node)
    leading = value_of(x).ndim - 1
    with graph.inserting_before(node):
        rows = x
        if value_of(x).stride(-1) != 1:
            rows = made("contiguous", rows)
        if leading != 1:
            rows = made("reshape", rows, -1, made("size", rows, -1))
        if not value_of(weight).is_contiguous():
            weight = made("contiguous", weight)
        product = made(linear, rows, [weight], [bias], impl=impl)
        if leading != 1:
            sizes = [made("size", x, i) for i in range(leading)]
            product = made("unflatten", product, 0, sizes)
    node.replace_all_uses_with(product)
    graph.erase_node(node)


def in_rows(step: Callable[..., Tensor], impl: str, num_ranks: int = 1) -> Callable[..., Tensor]:
    """Make an eager step batch-invariant: each row is computed by itself, also across ranks."""
    sums = with_own_functions(step, {**own_sums(), **sums_in_order(num_ranks), **OWN_TOP_K})
    return with_own_functions(sums, _own_products(impl))  # also of the functions within a sum


def _own_products(impl: str) -> Replacements:
    """Make the replacements of products and functions of single elements.

    Args:
        impl: an implementation of ``linear``.
    """

    def projected(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = input if input.stride(-1) == 1 else input.contiguous()
        return by_rows(rows, weight.contiguous(), bias, impl=impl)

    elementwise = {*_ELEMENTWISE, *(f"{name}_" for name in _ELEMENTWISE)}
    return {
        **dict.fromkeys(_PRODUCTS, _product),
        **dict.fromkeys(elementwise, _in_vectors),
        F.linear: projected,
    }


def _product(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a small product term by term, as ``narrow_products`` does; refuse most others."""
    operands = [x for x in args if isinstance(x, Tensor)]
    if func.__name__ in ("matmul", "__matmul__") and is_narrow(operands):
        return _narrow_product(*operands)
    _check_product(func.__name__, operands)
    return func(*args, **kwargs)


def _check_product(name: str, operands: Sequence[Tensor]) -> None:
    """Refuse a product whose elements are sums of several terms."""
    is_plain = len(operands) == 2 and name in ("matmul", "__matmul__", "mm", "bmm")
    if is_plain and operands[0].shape[-1] == 1:
        return
    raise UnsupportedError(
        f"batch_invariant: the model calls {name}, whose order of additions depends on the batch"
    )


def _narrow_product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply small matrices term by term, as the pass ``narrow_products`` does in graphs."""
    work = torch.promote_types(left.dtype, torch.float32)
    columns, rows = left.to(work).unsqueeze(-1).unbind(-2), right.to(work).unsqueeze(-3).unbind(-2)
    terms = [column * row for column, row in zip(columns, rows, strict=True)]
    return sum(terms[1:], terms[0]).to(left.dtype)


def _in_vectors(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute an elementwise function in whole vectors and stretches; on a GPU in whole blocks.

    Torch computes a stretch in one thread.
    """
    if not args or not args[0].is_floating_point():
        return func(*args, **kwargs)
    x, *others = args
    is_on_host = x.device.type == "cpu"
    whole = _VECTOR if is_on_host else _BLOCKS
    padded = F.pad(x.reshape(-1), (0, -x.numel() % whole), value=1.0)
    stretches = padded.split(_STRETCH) if is_on_host else [padded]
    pieces = [func(stretch, *others, **kwargs) for stretch in stretches]
    out = torch.cat(pieces)[: x.numel()].view(x.shape)
    return x.copy_(out) if func.__name__.endswith("_") else out
