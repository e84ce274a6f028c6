"""Compile a step into one graph, and keep what is known of that graph.

Dynamo traces the step with the first layers (``fullgraph``: a graph break is an error), the others
are put in as copies of those, the passes run on the whole graph, and Inductor compiles each
distinct region of the result. Guards are kept on the step's own inputs alone: weights and pools
belong to the runner, which never replaces them.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from torch_hybrid.graphs.compiling.clone_check import PoolClone, find_pool_clones
from torch_hybrid.graphs.compiling.compile_region import compile_region
from torch_hybrid.graphs.compiling.compiled_step import CompiledGraph, CompiledStep, arguments_of
from torch_hybrid.graphs.compiling.fixed_arithmetic import check_sums, fixed_arithmetic
from torch_hybrid.graphs.compiling.instantiate import drop_dead_checks, own_copy
from torch_hybrid.graphs.compiling.layers_once import LayerCount, LayersOnce
from torch_hybrid.graphs.compiling.regions import link, plan_regions, step_text
from torch_hybrid.graphs.passes import DEFAULT_PASSES, Pass, PassRecord, apply_passes
from torch_hybrid.graphs.passes.schedule import (
    Stage,
    is_collective_start,
    opaque_ops,
    read_schedule,
)
from torch_hybrid.ops.core.side_stream import JOIN


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRecord:
    """One compiled graph: what is in it, what it cost, and whether it copies a pool.

    One that ``is_loaded`` was compiled by another process, which is what it tells of.
    """

    num_nodes: int
    layers: LayerCount
    regions: tuple[int, ...]  # how often each compiled region is called
    ops: Counter[str]  # "op[impl]" to number of calls
    passes: tuple[PassRecord, ...]
    schedule: tuple[Stage, ...]  # empty for a step that is not in halves
    pool_clones: tuple[PoolClone, ...]
    seconds: float
    is_loaded: bool = False


@dataclass(slots=True)
class CompileLog:
    """All graphs that were compiled for one runner, in order."""

    graphs: list[GraphRecord] = field(default_factory=list)


class StepBackend:
    """Compiles traced graphs: the layers that were not traced, the passes, then Inductor, with a
    record of each graph.

    Args:
        log: where records go.
        pool_sizes: numbers of elements of the state pools, to find copies of them.
        layers: completes the graphs of its model.
        passes: run in order on the whole graph.
        fixes_arithmetic: whether a value is to have the same bits in all graphs.
    """

    def __init__(
        self,
        log: CompileLog,
        *,
        pool_sizes: Collection[int],
        layers: LayersOnce | None = None,
        passes: Sequence[Pass] = DEFAULT_PASSES,
        fixes_arithmetic: bool = False,
    ) -> None:
        self._log = log
        self._pool_sizes = pool_sizes
        self._layers = layers
        self._passes = passes
        self._fixes_arithmetic = fixes_arithmetic

    def compile(self, module: GraphModule) -> CompiledGraph:
        """Compile one traced graph."""
        start = time.perf_counter()
        module = own_copy(module)
        drop_dead_checks(module.graph)
        added, layers = self._complete(module)
        records = apply_passes(module, self._passes)
        num_nodes, schedule = len(module.graph.nodes), read_schedule(module.graph)
        compiled = self._compile(module, schedule, added)
        sources = [source for region in compiled.regions for source in region.sources]
        clones = [c for code in sources for c in find_pool_clones(code, self._pool_sizes)]
        self._log.graphs.append(
            GraphRecord(
                num_nodes=num_nodes,
                layers=layers,
                regions=compiled.counts,
                ops=compiled.ops,
                passes=tuple(records),
                schedule=schedule,
                pool_clones=tuple(clones),
                seconds=time.perf_counter() - start,
            )
        )
        return compiled

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
            torch._inductor.config.patch(_ANY_SIZE | _options_of_ranks(module.graph)),
            _inductor_options(schedule, planned),
            fixed_arithmetic() if self._fixes_arithmetic else nullcontext(),
        ):
            compiled = [
                compile_region(region, module, rounds_every_value=self._fixes_arithmetic)
                for region in plan.distinct
            ]
        if self._fixes_arithmetic:
            check_sums([source for region in compiled for source in region.sources])
        in_turn = [compiled[number] for number in plan.numbers]
        if schedule:
            _check_order([source for region in in_turn for source in region.sources], planned)
        text = step_text(module.graph, plan)
        return CompiledGraph(
            text=text,
            regions=tuple(compiled),
            counts=plan.counts,
            ops=sum((region.ops for region in in_turn), Counter()),
            arguments=arguments_of(module.graph, added),
            call=link(text, [region.call for region in compiled]),
        )


# A hit in autograd's cache would skip Inductor, and with it the code to look at.
_ALWAYS_INDUCTOR = {"enable_autograd_cache": False}

# Whether to pad a product of odd widths is asked of the traced sizes, and the answer is guarded: a
# graph for a GPU would not hold for smaller steps.
# Folding weights into code (freezing) would keep those of the first trace for ever.
_ANY_SIZE = {"shape_padding": False, "freezing": False}

# What a user may have set for other models. To freeze, Dynamo takes weights for constants, and ours
# may be exchanged; what is looked for in Inductor's code (copies of pools) stands in its Python.
_FOR_OTHERS = {"freezing": False, "cpp_wrapper": False}


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
    from torch_hybrid.graphs.passes.keep_order import keep_order

    options: AbstractContextManager[None] = keep_order(planned)
    return options


def _check_order(sources: Sequence[str], planned: Sequence[str]) -> None:
    from torch_hybrid.graphs.passes.keep_order import check_order

    check_order("\n".join(sources), planned)


def _with_own_code(function: Any) -> FunctionType:
    """A copy of ``function`` that shares no compiled graph with functions of the same source.

    Dynamo keeps graphs on the code object, which all closures made by one ``def`` share. Without
    guards on what they close over, one would run the graph of another.
    """
    code = function.__code__.replace()
    return FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def compile_step(step: Callable[..., Tensor], backend: StepBackend) -> CompiledStep:
    """Compile ``step(inputs, caches)`` for all sizes of its inputs.

    ``inputs`` is guarded: other sizes or other constants in it are another graph. ``caches`` and
    all that ``step`` closes over are not: they must stay the same objects.
    """

    def is_guarded(entry: Any) -> bool:
        name = entry.name.removeprefix("L['").replace("']", "", 1)
        if entry.guard_type == "DEFAULT_DEVICE":  # of the process: any thread may set it
            return False
        return not entry.name or name.startswith("inputs") or entry.guard_type == "SHAPE_ENV"

    def guard_filter(entries: Sequence[Any]) -> list[bool]:
        return [is_guarded(entry) for entry in entries]

    tracer = _Tracer(step, backend, guard_filter)
    return CompiledStep(tracer, tracer.graphs)


class _Tracer:
    """Runs a step by Dynamo, which traces it for inputs that it has no graph for.

    What Dynamo is given, and what it compiled, it keeps for as long as the process lives: it has
    this by weak references, and so the model and its pools.
    """

    def __init__(
        self,
        step: Callable[..., Tensor],
        backend: StepBackend,
        guard_filter: Callable[[Sequence[Any]], list[bool]],
    ) -> None:
        self._backend = backend
        self.graphs: list[CompiledGraph] = []
        itself = weakref.ref(self)

        def compile_graph(module: GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
            tracer = itself()
            assert tracer is not None
            number = len(tracer.graphs)
            tracer.graphs.append(tracer._backend.compile(module))
            return lambda *given: itself().graphs[number].call_of_traced(*given)  # type: ignore[union-attr]

        self._traced = torch.compile(
            _with_own_code(step),
            backend=compile_graph,
            fullgraph=True,
            dynamic=True,
            options={"guard_filter_fn": guard_filter},
        )

    def __call__(self, inputs: Any, caches: Any) -> Tensor:
        # Floats of the model (an eps) are constants: as inputs, each is a tensor made every step,
        # which no op takes. What sizes the process has seen before is no matter: equal ones (of the
        # halves) are one. These settings are of the whole process.
        with (
            torch._dynamo.config.patch(specialize_float=True, automatic_dynamic_shapes=False),
            torch._inductor.config.patch(_FOR_OTHERS),
        ):
            result: Tensor = self._traced(inputs, caches)
        return result
