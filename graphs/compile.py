"""Compile a step into one graph, and keep what is known of that graph.

Dynamo traces the step with the first layers (``fullgraph``: a graph break is an error), the others
are put in as copies of those, the passes run on the whole graph, and Inductor compiles each
distinct region of the result. Guards are kept on the step's own inputs alone: weights and pools
belong to the runner, which never replaces them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from torch_hybrid.graphs.clone_check import PoolClone, find_pool_clones
from torch_hybrid.graphs.instantiate import drop_dead_checks, own_copy
from torch_hybrid.graphs.layers_once import LayerCount, LayersOnce
from torch_hybrid.graphs.mutation import storages
from torch_hybrid.graphs.passes import DEFAULT_PASSES, Pass, PassRecord, apply_passes
from torch_hybrid.graphs.regions import Compiled, Region, join, plan_regions
from torch_hybrid.graphs.schedule import Stage, is_collective_start, opaque_ops, read_schedule
from torch_hybrid.graphs.values import value_of
from torch_hybrid.ops.registration import NAMESPACE, REGISTERED
from torch_hybrid.ops.side_stream import JOIN


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRecord:
    """One compiled graph: what is in it, what it cost, and whether it copies a pool."""

    num_nodes: int
    layers: LayerCount
    regions: tuple[int, ...]  # how often each compiled region is called
    ops: Counter[str]  # "op[impl]" to number of calls
    passes: tuple[PassRecord, ...]
    schedule: tuple[Stage, ...]  # empty for a step that is not in halves
    pool_clones: tuple[PoolClone, ...]
    seconds: float


@dataclass(slots=True)
class CompileLog:
    """All graphs that were compiled for one runner, in order."""

    graphs: list[GraphRecord] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGraph:
    """What a graph was compiled to; ``ops`` are those of all calls, ``sources`` the codes."""

    step: Callable[..., Any]
    regions: tuple[int, ...] = ()
    ops: Counter[str] = field(default_factory=Counter)
    sources: tuple[str, ...] = ()


class StepBackend:
    """A ``torch.compile`` backend: the layers that were not traced, the passes, then Inductor, with
    a record of each graph.

    Args:
        log: where records go.
        pool_sizes: numbers of elements of the state pools, to find copies of them.
        layers: completes the graphs of its model.
        passes: run in order on the whole graph.
    """

    def __init__(
        self,
        log: CompileLog,
        *,
        pool_sizes: Collection[int],
        layers: LayersOnce | None = None,
        passes: Sequence[Pass] = DEFAULT_PASSES,
    ) -> None:
        self._log = log
        self._pool_sizes = pool_sizes
        self._layers = layers
        self._passes = passes

    def __call__(self, module: GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one traced graph."""
        start = time.perf_counter()
        module = own_copy(module)
        drop_dead_checks(module.graph)
        added, layers = self._complete(module)
        records = apply_passes(module, self._passes)
        num_nodes, schedule = len(module.graph.nodes), read_schedule(module.graph)
        compiled = self._compile(module, schedule, added)
        clones = [c for code in compiled.sources for c in find_pool_clones(code, self._pool_sizes)]
        self._log.graphs.append(
            GraphRecord(
                num_nodes=num_nodes,
                layers=layers,
                regions=compiled.regions,
                ops=compiled.ops,
                passes=tuple(records),
                schedule=schedule,
                pool_clones=tuple(clones),
                seconds=time.perf_counter() - start,
            )
        )
        return compiled.step

    def _complete(self, module: GraphModule) -> tuple[list[Tensor], LayerCount]:
        if self._layers is None:
            return [], LayerCount(traced=0, copied=0)
        return self._layers.complete(module)

    def _compile(
        self, module: GraphModule, schedule: Sequence[Stage], added: Sequence[Tensor]
    ) -> CompiledGraph:
        """Compile each distinct region of a graph; ``added`` are the tensors of its last
        placeholders, which whoever calls the step does not know."""
        planned = opaque_ops(module.graph)
        plan = plan_regions(module.graph)
        with (
            torch._functorch.config.patch(_ALWAYS_INDUCTOR),
            torch._inductor.config.patch(_options_of_ranks(module.graph)),
            _inductor_options(schedule, planned),
        ):
            compiled = [compile_region(region, module) for region in plan.distinct]
        in_turn = [compiled[number] for number in plan.numbers]
        if schedule:
            _check_order([source for region in in_turn for source in region.sources], planned)
        return CompiledGraph(
            step=_holding(compiled, join(module.graph, plan, [r.call for r in compiled], added)),
            regions=plan.counts,
            ops=sum((region.ops for region in in_turn), Counter()),
            sources=tuple(source for region in compiled for source in region.sources),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledRegion:
    """One region as Inductor compiled it; ``call`` takes the list of its inputs.

    ``owner`` is what ``call`` was taken from, and takes it apart when it is freed.
    """

    call: Compiled
    owner: object
    ops: Counter[str]
    sources: tuple[str, ...]


def compile_region(region: Region, root: GraphModule) -> CompiledRegion:
    """Compile a region of the graph of ``root`` by Inductor."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    module = region.module(root)
    inputs = [value_of(node) for node in region.inputs]
    is_plain = not _returns_inputs(module.graph)
    num_given = _num_inputs_and_outputs(module.graph)
    direct: list[Any] = []
    sources: list[str] = []
    ops: Counter[str] = Counter()

    def compile_inner(graph: GraphModule, *args: Any, **options: Any) -> Any:
        ops.update(_ops_of(graph))
        compiled: Any = compile_fx_inner(graph, *args, **options)
        sources.append(compiled.source_code)
        if is_plain and _num_inputs_and_outputs(graph.graph) == num_given:
            direct.append(compiled)
        return compiled

    wrapped: Any = compile_fx(module, inputs, inner_compile=compile_inner)

    def call(given: list[Any]) -> Sequence[Any]:
        result: Sequence[Any] = wrapped(*given)
        return result

    # Autograd's wrapper takes three times as long as the call itself, and has nothing to do where
    # values go in and out as they are.
    is_direct = len(direct) == len(sources) == 1
    return CompiledRegion(
        call=direct[0].current_callable if is_direct else call,
        owner=direct if is_direct else wrapped,
        ops=ops,
        sources=tuple(sources),
    )


def _holding(owners: object, step: Callable[..., Any]) -> Callable[..., Any]:
    """``step``, which keeps ``owners`` alive."""
    step.__dict__["owners"] = owners
    return step


def _num_inputs_and_outputs(graph: Graph) -> tuple[int, int]:
    return len(graph.find_nodes(op="placeholder")), len(graph.output_node().args[0])  # type: ignore[arg-type]


def _returns_inputs(graph: Graph) -> bool:
    """Whether a graph returns what it is given, or a view of it."""
    given = storages(graph.find_nodes(op="placeholder"))
    returned = graph.output_node().all_input_nodes
    return any(n.op == "placeholder" for n in returned) or bool(storages(returned) & given)


# A hit in autograd's cache would skip Inductor, and with it the code to look at.
_ALWAYS_INDUCTOR = {"enable_autograd_cache": False}


def _options_of_ranks(graph: Graph) -> dict[str, bool]:
    """With collectives, how sums are cut up is not chosen by timing: ranks would choose
    differently, and what each computes for itself must have the same bits on all."""
    return {"deterministic": True} if any(map(is_collective_start, graph.nodes)) else {}


def _inductor_options(
    schedule: Sequence[Stage], planned: Sequence[str]
) -> AbstractContextManager[Any]:
    """Inductor's own order for a plain step, and the graph's where a pass has set one."""
    if not schedule and JOIN not in planned:
        return nullcontext()
    from torch_hybrid.graphs.keep_order import keep_order

    options: AbstractContextManager[None] = keep_order(planned)
    return options


def _check_order(sources: Sequence[str], planned: Sequence[str]) -> None:
    from torch_hybrid.graphs.keep_order import check_order

    check_order("\n".join(sources), planned)


def _ops_of(graph: GraphModule) -> Counter[str]:
    """Calls of this package's ops by implementation, in a functionalized graph."""
    ops: Counter[str] = Counter()
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        target = (
            str(node.args[0]) if "auto_functionalized" in str(node.target) else str(node.target)
        )
        namespace, _, name = target.partition(".")
        name = name.partition(".")[0]
        if namespace == NAMESPACE and name in REGISTERED:
            ops[f"{name}[{node.kwargs.get('impl')}]"] += 1
    return ops


def _with_own_code(function: Any) -> FunctionType:
    """A copy of ``function`` that shares no compiled graph with functions of the same source.

    Dynamo keeps graphs on the code object, which all closures made by one ``def`` share. Without
    guards on what they close over, one would run the graph of another.
    """
    code = function.__code__.replace()
    return FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def compile_step(step: Callable[..., Any], backend: StepBackend) -> Callable[..., Any]:
    """Compile ``step(inputs, caches)`` for all sizes of its inputs.

    ``inputs`` is guarded: other sizes or other constants in it are another graph. ``caches`` and
    all that ``step`` closes over are not: they must stay the same objects.
    """

    def is_guarded(entry: Any) -> bool:
        name = entry.name.removeprefix("L['").replace("']", "", 1)
        return not entry.name or name.startswith("inputs") or entry.guard_type == "SHAPE_ENV"

    def guard_filter(entries: Sequence[Any]) -> list[bool]:
        return [is_guarded(entry) for entry in entries]

    compiled: Callable[..., Any] = torch.compile(
        _with_own_code(step),
        backend=backend,
        fullgraph=True,
        dynamic=True,
        options={"guard_filter_fn": guard_filter},
    )
    return compiled
