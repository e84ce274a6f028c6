"""Kernels of a graph's ops, built by threads before the ops are called, or while Inductor compiles.

An op in Triton builds its kernels at its first call, one after the other. For all ops of a model
that takes as long as Inductor does. Nearly all of it happens in LLVM, ptxas and a C compiler, and
needs no interpreter. So on a GPU threads call each such op ahead, on padding:

    tensors of the model, pools, inputs:  those of the step, whose inputs name null slots and pages
    values between ops:                   zeros of the shapes and strides that the step gives them
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from torch_hybrid.graphs.passes.values import value_of


def start_workers() -> None:
    """Start the processes in which Inductor builds Triton kernels, as its own backend does.

    They import torch while Dynamo traces. So does a thread hash Triton's files, for the cache.
    """
    from torch._inductor.async_compile import maybe_warm_pool
    from triton.runtime.cache import triton_key

    maybe_warm_pool()
    Thread(target=triton_key, name="triton-key", daemon=True).start()


class KernelsAhead:
    """Calls of a graph's ops that build the ops' kernels. They need no graph.

    Args:
        graph: a traced graph, after its passes.
    """

    def __init__(self, graph: Graph) -> None:
        self._given = [_Value(node) for node in graph.find_nodes(op="placeholder")]
        calls = {str(call): call for call in map(_Call, filter(_is_in_triton, graph.nodes))}
        self._of_ops: dict[str, list[_Call]] = {}  # calls of one op have kernels in common
        for call in calls.values():
            self._of_ops.setdefault(str(call.op), []).append(call)

    @contextmanager
    def building(self, arguments: Sequence[Any]) -> Iterator[None]:
        """Build kernels meanwhile, and wait for them at the end.

        Errors are left to the step's own calls.

        Args:
            arguments: arguments of the graph's call, for a step of padding.
        """
        given = dict(zip((value.name for value in self._given), arguments, strict=True))
        sizes: dict[Any, int] = {}
        for value, argument in zip(self._given, arguments, strict=True):
            sizes |= value.sizes_in(argument)
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        device = next((each.device for each in tensors if each.device.type == "cuda"), None)
        stream = None if device is None else torch.cuda.current_stream(device)

        def make(calls: Iterable[_Call]) -> None:
            with torch.inference_mode(), torch.cuda.stream(stream):
                for call in calls:
                    with suppress(Exception):
                        call(given, sizes)

        with ThreadPoolExecutor(len(self._of_ops) or 1, "kernels-ahead") as pool:
            for calls in self._of_ops.values():
                pool.submit(make, calls)
            yield


def _is_in_triton(node: Node) -> bool:
    """Tell whether a node calls an op that Triton computes: one of ours that waits for no rank."""
    return node.op == "call_function" and "triton" in str(node.kwargs.get("impl"))


class _Call:
    """Call of an op. Calls of one text build the same kernels."""

    def __init__(self, node: Node) -> None:
        self.op: Any = node.target
        leaves, self.structure = pytree.tree_flatten((node.args, dict(node.kwargs)))
        self.leaves = [_Value(leaf) if isinstance(leaf, Node) else leaf for leaf in leaves]

    def __str__(self) -> str:
        return f"{self.op} {self.structure} {[str(leaf) for leaf in self.leaves]}"

    def __call__(self, given: Mapping[str, Any], sizes: Mapping[Any, int]) -> None:
        """Call the op on the values that are given by name, and on zeros."""
        leaves = [x.of(given, sizes) if isinstance(x, _Value) else x for x in self.leaves]
        args, options = pytree.tree_unflatten(leaves, self.structure)
        self.op(*args, **options)


class _Value:
    """Value of a node: a number, or a tensor's sizes, of which some differ from step to step."""

    def __init__(self, node: Node) -> None:
        self.name, value = node.name, value_of(node)
        self.like = (value.dtype, value.device) if isinstance(value, Tensor) else None
        numbers = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
        self.numbers = tuple(n.node.expr if isinstance(n, torch.SymInt) else n for n in numbers)

    def __str__(self) -> str:
        return f"{self.numbers} {self.like}"

    def sizes_in(self, argument: Any) -> dict[Any, int]:
        """Read the symbolic sizes that an argument in the place of this value has."""
        found = argument.shape if isinstance(argument, Tensor) else (argument,)
        pairs = zip(self.numbers, found, strict=False)
        return {symbol: n for symbol, n in pairs if getattr(symbol, "is_Symbol", False)}

    def of(self, given: Mapping[str, Any], sizes: Mapping[Any, int]) -> Any:
        """Return what is given by this name; else the number, or a tensor of zeros."""
        if self.name in given:
            return given[self.name]
        numbers = [int(n.subs(sizes)) if hasattr(n, "subs") else n for n in self.numbers]
        if self.like is None:
            return numbers[0]
        dtype, device = self.like
        rank = len(numbers) // 2
        shape, strides = numbers[:rank], numbers[rank:]
        return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()
