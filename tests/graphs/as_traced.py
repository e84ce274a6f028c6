"""A StepBackend without Inductor: copied layers and passes, then the graph node by node."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.fx import GraphModule

from torch_hybrid.graphs.compiling.compile import StepBackend
from torch_hybrid.graphs.compiling.compile_region import _ops_of
from torch_hybrid.graphs.compiling.compiled_step import CompiledGraph, arguments_of
from torch_hybrid.graphs.passes.schedule import is_collective_start
from torch_hybrid.ops.linear.op import linear


def run_as_traced() -> AbstractContextManager[Any]:
    """A context in which steps are traced and not compiled."""
    return mock.patch.object(StepBackend, "_compile", _as_traced)


def _as_traced(
    _backend: StepBackend, module: GraphModule, _schedule: object, added: Sequence[Tensor]
) -> CompiledGraph:
    ops = _ops_of(module)
    merged = module.graph.find_nodes(op="call_function", target=linear)
    ops.update(f"linear[{node.kwargs['impl']}]" for node in merged)
    ops.update(str(node.target) for node in module.graph.nodes if is_collective_start(node))
    arguments = arguments_of(module.graph, added)
    return CompiledGraph(arguments=arguments, call=module, ops=ops)
