"""A graph pass: the k best of short rows, as routers choose experts, become one op.

``OWN_TOP_K`` does the same for a model that runs eagerly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from torch_hybrid.graphs.passes.own_functions import Replacements
from torch_hybrid.graphs.passes.values import value_of
from torch_hybrid.ops.core.capability import Need
from torch_hybrid.ops.top_k.op import IMPLEMENTATIONS, TOP_K


def own_top_k(graph: Graph) -> None:
    """Replace each ``topk`` of rows of up to 1024 elements by the op ``top_k``.

    Contract: the graph computes the same values; of equal elements the op takes the first, where
    torch leaves the choice open. On a GPU the op is one launch; ``torch.topk`` takes up to twenty
    and sorts. Nothing changes where the op has no native implementation (a CPU).

    for each topk of the largest along the last dim, its k a number:
        values, places = top_k(x, k)
    """
    for node in graph.nodes:
        if (wanted := _operands(node)) is not None:
            x, k = wanted
            node.op, node.target = "call_function", TOP_K
            node.args, node.kwargs = (x, k), {"impl": "triton"}
            del node.meta["example_value"]


def _operands(node: Node) -> tuple[Node, int] | None:
    """Find the rows and the k of a call that the op can replace; None for another call."""
    if node.target is not torch.topk and (node.op, node.target) != ("call_method", "topk"):
        return None
    x, k, dim, largest = _arguments(*node.args, **node.kwargs)  # type: ignore[arg-type]
    return (x, k) if _is_served(value_of(x), k, dim, largest) else None


def _is_served(rows: Any, k: object, dim: int, largest: bool) -> bool:
    """Tell whether the native implementation finds the k largest of such rows."""
    if not isinstance(rows, Tensor) or not isinstance(k, int) or not largest:
        return False
    if rows.dim() == 0 or dim not in (-1, rows.dim() - 1) or not isinstance(rows.shape[-1], int):
        return False
    sizes = {"num_columns": rows.shape[-1], "k": k}
    need = Need(device=rows.device, dtype=rows.dtype, sizes=sizes)
    return not IMPLEMENTATIONS["triton"].capability.why_not(need)


def _arguments(
    input: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Any, Any, int, bool]:
    """Pick the arguments of ``topk`` that matter, whether passed by position or by name."""
    return input, k, dim, largest


def _top_k(func: Any, *args: Any, **kwargs: Any) -> Any:
    x, k, dim, largest = _arguments(*args, **kwargs)
    if not _is_served(x, k, dim, largest):
        return func(*args, **kwargs)
    return torch.return_types.topk(TOP_K(x, k, impl="triton"))


# Torch's own order of equal elements depends on the number of rows.
OWN_TOP_K: Replacements = {"topk": _top_k}
