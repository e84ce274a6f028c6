"""Compilation of a step into one graph, with a record of that graph.

Dynamo traces the step with the model's first layers; a graph break is an error (``fullgraph``).
Copies of these layers stand in for the others. Passes rewrite the whole graph, and Inductor
compiles each distinct region of the result. Guards are kept on the step's own inputs alone: weights
and pools belong to the runner, which never replaces them.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.fx import Graph, GraphModule
from torch.utils import _pytree as pytree

from torch_hybrid.graphs.compiling.clone_check import PoolClone, find_pool_clones
from torch_hybrid.graphs.compiling.compile_region import built_together, compile_region
from torch_hybrid.graphs.compiling.compiled_step import (
    CompiledGraph,
    CompiledStep,
    arguments_of,
    arguments_on,
)
from torch_hybrid.graphs.compiling.fixed_arithmetic import check_sums, fixed_arithmetic
from torch_hybrid.graphs.compiling.instantiate import drop_dead_checks, own_copy
from torch_hybrid.graphs.compiling.kernels_ahead import KernelsAhead
from torch_hybrid.graphs.compiling.layers_once import LayerCount, LayersOnce
from torch_hybrid.graphs.compiling.regions import link, plan_regions, step_text
from torch_hybrid.graphs.compiling.sources import sources_of
from torch_hybrid.graphs.passes import DEFAULT_PASSES, Pass, PassRecord, apply_passes
from torch_hybrid.graphs.passes.schedule import (
    Stage,
    is_collective_start,
    opaque_ops,
    read_schedule,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRecord:
    """Record of one compiled graph: its nodes and ops, its compile time, and its copies of pools.

    If ``is_loaded``, another process compiled the graph, and the record describes that compilation.
    """

    num_nodes: int
    layers: LayerCount
    regions: tuple[int, ...]  # number of calls of each compiled region
    ops: Counter[str]  # "op[impl]" to number of calls
    passes: tuple[PassRecord, ...]
    schedule: tuple[Stage, ...]  # empty for a step that is not in halves
    pool_clones: tuple[PoolClone, ...]
    seconds: float
    is_loaded: bool = False


@dataclass(slots=True)
class CompileLog:
    """Records of all graphs that were compiled for one runner, in order."""

    graphs: list[GraphRecord] = field(default_factory=list)


@dataclass(eq=False)
class StepBackend:
    """Compiler of traced graphs: it adds missing layers, runs the passes, and calls Inductor."""

    log: CompileLog  # receives a record of each graph
    # numbers of elements of the state pools; copies of pools are found by these
    pool_sizes: Collection[int]
    # adds the layers that were not traced; None if the model was traced whole
    layers: LayersOnce | None = None
    passes: Sequence[Pass] = DEFAULT_PASSES  # graph passes, run in order on the whole graph
    builds_ahead: bool = False  # whether threads build kernels of ops (``KernelsAhead``)
    # padding of the sizes that come first: kernels are built for these, and a trace runs nothing
    first: Any = None
    fixes_arithmetic: bool = False  # whether a value must have the same bits in all graphs

    @contextmanager
    def building_for(self, first: Any) -> Iterator[None]:
        """Build kernels for ``first`` where a step is traced meanwhile."""
        self.first = first
        try:
            yield
        finally:
            self.first = None

    def compile(self, module: GraphModule) -> CompiledGraph:
        """Compile one traced graph."""
        start = time.perf_counter()
        module = own_copy(module)
        drop_dead_checks(module.graph)
        added, layers = list[Tensor](), LayerCount(traced=0, copied=0)
        if self.layers is not None:
            added, layers = self.layers.complete(module)
        records = apply_passes(module, self.passes)
        num_nodes, schedule = len(module.graph.nodes), read_schedule(module.graph)
        compiled = self._compile(module, schedule, added)
        sources = [source for region in compiled.regions for source in region.sources]
        clones = [c for code in sources for c in find_pool_clones(code, self.pool_sizes)]
        self.log.graphs.append(
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

    def _compile(
        self, module: GraphModule, schedule: Sequence[Stage], added: Sequence[Tensor]
    ) -> CompiledGraph:
        """Compile each distinct region of a graph.

        ``added`` are the tensors of the graph's last placeholders; the caller of the step does not
        pass these.
        """
        from torch_hybrid.graphs.compiling.direct_calls import direct_calls

        planned = opaque_ops(module.graph)
        plan = plan_regions(module.graph)
        kernels, building = None, built_together()
        if self.builds_ahead:
            kernels = KernelsAhead(module.graph)
            building = kernels.building(arguments_on(self.first, module.graph, added))
        options = _ANY_SIZE | _options_of_ranks(module.graph) | direct_calls()
        with (
            torch._functorch.config.patch(_ALWAYS_INDUCTOR),
            torch._inductor.config.patch(options),
            _cached_by_vectors(),
            _inductor_options(schedule, planned),
            fixed_arithmetic() if self.fixes_arithmetic else nullcontext(),
            building,
        ):
            compiled = [
                compile_region(region, module, rounds_every_value=self.fixes_arithmetic)
                for region in plan.distinct
            ]
        if self.fixes_arithmetic:
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
            sources=sources_of(TracingContext.get().traced_code),
            kernels=kernels,
        )


# A hit in autograd's cache would skip Inductor, and with it the code to look at.
_ALWAYS_INDUCTOR = {"enable_autograd_cache": False}

# Inductor decides by the traced sizes whether to pad a product of odd widths, and guards on the
# answer: a graph for a GPU would not hold for smaller steps.
# Folding weights into code (freezing) would keep those of the first trace for ever.
_ANY_SIZE = {"shape_padding": False, "freezing": False}

# Settings that a user may have made for other models. Freezing turns weights into constants, and
# ours may be exchanged; the check for copies of pools reads Inductor's Python wrapper, not C++.
_FOR_OTHERS = {"freezing": False, "cpp_wrapper": False}


def _options_of_ranks(graph: Graph) -> dict[str, bool]:
    """Choose Inductor's options for a graph with collectives: reductions are not tuned by timing.

    Ranks would choose differently, and values that every rank computes must have the same bits.
    """
    return {"deterministic": True} if any(map(is_collective_start, graph.nodes)) else {}


def _inductor_options(
    schedule: Sequence[Stage], planned: Sequence[str]
) -> AbstractContextManager[Any]:
    """Choose the order of a region's ops: the graph's if a pass has set one, or Inductor's own."""
    if not schedule:
        return nullcontext()
    from torch_hybrid.graphs.passes.keep_order import keep_order

    options: AbstractContextManager[None] = keep_order(planned)
    return options


def _cached_by_vectors() -> AbstractContextManager[Any]:
    """Let Inductor find cached code for vectors of this process's width alone.

    Its key does not tell AVX2 from AVX-512, be it another CPU or ``ATEN_CPU_CAPABILITY`` (torch
    2.13). What it finds is built for the CPU that is here. Code made for vectors of 8 floats then
    writes 16, past the end of its results.
    """
    config: Any = torch.compiler.config
    capability = torch.backends.cpu.get_cpu_capability()
    tagged: AbstractContextManager[Any] = config.patch(
        cache_key_tag=f"{config.cache_key_tag} {capability}"
    )
    return tagged


def _check_order(sources: Sequence[str], planned: Sequence[str]) -> None:
    from torch_hybrid.graphs.passes.keep_order import check_order

    check_order("\n".join(sources), planned)


def _with_own_code(function: Any) -> FunctionType:
    """Copy ``function``, so that it shares no compiled graph with functions of the same source.

    Dynamo keeps graphs on the code object, which all closures made by one ``def`` share. Without
    guards on the variables that they close over, one would run the graph of another.
    """
    code = function.__code__.replace()
    return FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def compile_step(step: Callable[..., Tensor], backend: StepBackend) -> CompiledStep:
    """Compile ``step(inputs, caches)`` for all sizes of its inputs.

    ``inputs`` is guarded: sizes that fail a guard, or other constants, need another graph.
    ``caches`` and all that ``step`` closes over are not guarded, and must stay the same objects.
    """

    def is_guarded(entry: Any) -> bool:
        name = entry.name.removeprefix("L['").replace("']", "", 1)
        if entry.guard_type == "DEFAULT_DEVICE":  # any thread may change this setting
            return False
        return not entry.name or name.startswith("inputs") or entry.guard_type == "SHAPE_ENV"

    def guard_filter(entries: Sequence[Any]) -> list[bool]:
        return [is_guarded(entry) for entry in entries]

    tracer = _Tracer(step, backend, guard_filter)
    return CompiledStep(tracer, tracer.graphs)


class _Tracer:
    """Caller of a step through Dynamo, which traces the step for inputs that fit no graph so far.

    Dynamo keeps its argument and its compiled function until the process ends. Both hold the tracer
    by a weak reference, so the model and its pools can be freed.
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
            number, num_outputs = len(tracer.graphs), len(module.graph.output_node().args[0])  # type: ignore[arg-type]
            tracer.graphs.append(tracer._backend.compile(module))

            def call(*given: Any) -> Sequence[Any]:
                tracer = itself()
                assert tracer is not None
                if tracer._backend.first is not None:
                    return (None,) * num_outputs
                return tracer.graphs[number].call_of_traced(*given)

            return call

        self._traced = torch.compile(
            _with_own_code(step),
            backend=compile_graph,
            fullgraph=True,
            dynamic=True,
            options={"guard_filter_fn": guard_filter},
        )

    def __call__(self, inputs: Any, caches: Any) -> Tensor:
        # Pools keep their sizes; torch 2.11 passes those of other tensors as arguments.
        pytree.tree_map_only_(Tensor, torch._dynamo.mark_static, caches)
        # Numbers of the model are constants. As inputs, a float (an eps) would be a tensor made at
        # every step, which no op accepts, and an integer (of adapted layers) what Dynamo alone
        # finds. Sizes are symbolic from the first trace on, whatever sizes the process has seen
        # before; equal ones (of the halves) share a symbol. These settings are those of the whole
        # process.
        with (
            torch._dynamo.config.patch(
                specialize_float=True, specialize_int=True, automatic_dynamic_shapes=False
            ),
            torch._inductor.config.patch(_FOR_OTHERS),
        ):
            result: Tensor = self._traced(inputs, caches)
        return result
