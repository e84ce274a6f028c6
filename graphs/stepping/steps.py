"""Steps of a runner: each compiled, or loaded from an artefact, when it is first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import RLock

import torch
from torch import Tensor

from torch_hybrid.backends.mode import Mode
from torch_hybrid.backends.select import Choice, impls_of
from torch_hybrid.caches.hybrid import HybridCache
from torch_hybrid.errors import UnsupportedError
from torch_hybrid.graphs.artefact.store import StepStore
from torch_hybrid.graphs.compiling.compile import CompileLog, GraphRecord, StepBackend, compile_step
from torch_hybrid.graphs.compiling.compiled_step import CompiledGraph, CompiledStep
from torch_hybrid.graphs.compiling.fixed_arithmetic import fuses_freely
from torch_hybrid.graphs.compiling.kernels_ahead import start_workers
from torch_hybrid.graphs.compiling.layers_once import LayersOnce
from torch_hybrid.graphs.compiling.toolchain import named_failures, switched_off_by
from torch_hybrid.graphs.passes import Pass
from torch_hybrid.graphs.passes.own_linears import OwnLinears, has_large_linears
from torch_hybrid.graphs.passes.row_products import in_rows
from torch_hybrid.graphs.step import (
    Caches,
    DraftingModel,
    Inputs,
    Model,
    StepFunction,
    Variant,
    make_draft_step,
    make_step,
    map_tensors,
)
from torch_hybrid.graphs.stepping.model_choices import choices_of, modules_of
from torch_hybrid.graphs.stepping.model_use import Attachable, ModelUse
from torch_hybrid.graphs.stepping.planner import StepPlanner
from torch_hybrid.host.progress import bar, be_silent, tell
from torch_hybrid.layers.adapted import AdaptedLayers

# Seconds to compile a step, measured with Qwen3-Next's kinds of layers, any number of them, on two
# cores of an Ice Lake Xeon. The first step of a process also finds out what the compiler can do.
_SECONDS_FIRST, _SECONDS_MORE = 40, 15
_COMPILING = RLock()  # runners of several threads compile one after another


@contextmanager
def compiling() -> Iterator[None]:
    """Keep other threads of this process from compiling meanwhile."""
    with _COMPILING:
        yield


def be_alone() -> None:
    """Forget the locks and threads of the parent, in a forked process that has none of the threads.

    Without this, Inductor would hand a kernel to a thread that compiled before, and wait for it.
    """
    from torch._inductor.async_compile import AsyncCompile

    global _COMPILING
    _COMPILING = RLock()
    be_silent()
    ModelUse.forget()
    AsyncCompile.pool.cache_clear()
    AsyncCompile.process_pool.cache_clear()
    AsyncCompile._ready_future = None


class Steps:
    """Steps of a runner: one function for each variant.

    Args:
        model: the model that the steps run.
        cache: pools of the model's layers.
        planner: plans the inputs that steps are traced with.
        adapted: layers that adapters change in steps that have some.
        passes: graph passes of each mode.
        choices: chosen implementations beside those of the backends: of experts and linear layers.
        given: tensors that steps read beside the pools of their layers.
        store: artefact that may hold compiled steps; None compiles nothing and runs the model
            eagerly.
        by_row: batch-invariant: a row's bits do not depend on the other rows. The passes and the
            compiler ensure this in graphs.
    """

    def __init__(
        self,
        model: Model,
        cache: HybridCache,
        planner: StepPlanner,
        *,
        adapted: AdaptedLayers | None = None,
        passes: Mapping[Mode, Sequence[Pass]],
        choices: Sequence[Choice],
        given: Caches,
        store: StepStore | None,
        by_row: bool = False,
    ) -> None:
        self._model, self._choices = model, choices
        self._module_choices = choices_of(model, choices)
        adapted = None if adapted is None else adapted.for_steps()
        self._adapted = adapted
        self._attached: tuple[Attachable, ...] = ()
        factors = {} if adapted is None else adapted.by_path
        self.layers = LayersOnce(model, cache.pools, factors)
        self._use = ModelUse.of(model)
        self._use.caches.add(cache)
        self._caches, self._planner, self._store = {**cache.pools, **given}, planner, store
        self._log = CompileLog()
        self._place: dict[str, int] = {}  # variant's name -> place of its graph in the log
        self._breaks_before = _count_graph_breaks()
        pools = cache.pool_tensors()
        self.of: dict[Variant, StepFunction] = {
            variant: _step_of(model, variant, adapted) for variant in planner.forms
        }
        if store is None:
            impl = dict(impls_of(choices)).get("linear", "torch")
            if by_row:
                num_ranks = 1 if model.ranks is None else model.ranks.size
                self.of = {
                    variant: in_rows(step, impl, num_ranks) for variant, step in self.of.items()
                }
            elif impl == "cpp" and has_large_linears(modules := modules_of(model)):
                self._attached = (OwnLinears.of(modules, impl),)
            return
        small = {id(scales) for scales in cache.scales.values()}
        pool_sizes = {pool.numel() for pool in pools if id(pool) not in small}
        self._backends = {
            mode: StepBackend(
                self._log,
                pool_sizes=pool_sizes,
                layers=None if mode.num_chained else self.layers,
                passes=own,
                builds_ahead=model.device.type == "cuda",
                fixes_arithmetic=by_row and fuses_freely(model.device),
            )
            for mode, own in passes.items()
        }
        self.of = {
            variant: compile_step(step, self._backends[variant.mode])
            for variant, step in self.of.items()
        }

    @property
    def graphs(self) -> dict[str, GraphRecord]:
        """Records of the graphs of ready variants, by the variant's name."""
        return {name: self._log.graphs[place] for name, place in self._place.items()}

    @property
    def recompiles(self) -> int:
        """Graphs beyond the one that each variant needs."""
        return len(self._log.graphs) - len(self._place)

    @property
    def graph_breaks(self) -> int:
        """Number of graph breaks in this process since these steps were made."""
        return _count_graph_breaks() - self._breaks_before

    @contextmanager
    def running(self, variant: Variant) -> Iterator[Callable[[Inputs], Tensor]]:
        """Hold the model for a variant's step, which is ready, and yield the function that runs it.

        No other thread traces the model meanwhile.
        """
        step = self.of[variant]
        runs_model = not isinstance(step, CompiledStep)
        choices = self._module_choices if runs_model else ()
        attached = self._attached_to(variant)
        running = self._use.running(self._model, choices, attached, runs_model=runs_model)
        with running, torch.inference_mode():
            yield partial(self._run, step, variant)

    def build_kernels(self, variant: Variant, inputs: Inputs) -> None:
        """Build the kernels of the ops that a variant's step of padding calls, many at once."""
        step = self.of[variant]
        if isinstance(step, CompiledStep):
            step.build_kernels(inputs)

    def _attached_to(self, variant: Variant) -> tuple[Attachable, ...]:
        """List what the model's modules have in a variant's step."""
        if self._adapted is None or not variant.has_adapters:
            return self._attached
        return (self._adapted, *self._attached)

    def _run(self, step: StepFunction, variant: Variant, inputs: Inputs) -> Tensor:
        """Run a step; for inputs that fit none of its graphs Dynamo may trace it, as ``prepare``
        does."""
        if not isinstance(step, CompiledStep) or step.fits(inputs):
            return step(inputs, self._caches)
        with self._use.paused(), self._tracing(inputs, variant):
            return step.trace(inputs, self._caches)

    def is_ready(self, variant: Variant) -> bool:
        """Tell whether a variant can run without ``prepare``."""
        return variant.name in self._place or not isinstance(self.of[variant], CompiledStep)

    def prepare(
        self, variant: Variant, first: Inputs | None = None, *, tells: bool = True
    ) -> GraphRecord | None:
        """Load a variant's graph from the artefact, or trace and compile it.

        Tracing runs on padding alone, so it changes no state.

        Args:
            variant: kind of step to make ready.
            first: inputs on the host of the step that will run first, if they are known.
            tells: print a line and a progress bar when the step has to be compiled.

        Returns:
            The record of the graph; None if the variant was ready, or is not compiled.
        """
        if self.is_ready(variant):
            return None
        step = self.of[variant]
        assert isinstance(step, CompiledStep)
        assert self._store is not None
        inputs = self._inputs(variant)
        place = len(self._log.graphs)
        found = self._store.find(variant.name, inputs, self._choices)
        if found is None:
            with self._telling(variant) if tells else nullcontext():
                self._trace(step, inputs, variant, first)
        else:
            step.graphs.append(found[0])
            self._log.graphs.append(found[1])
        self._place[variant.name] = place
        return self._log.graphs[place]

    def _telling(self, variant: Variant) -> AbstractContextManager[object]:
        """Print that a variant is compiled, and show a progress bar meanwhile."""
        has_compiled = bool(torch._dynamo.utils.counters["stats"])
        seconds = _SECONDS_MORE if has_compiled else _SECONDS_FIRST
        duration = f"about {seconds} s, " if self._model.device.type == "cpu" else ""
        doing = f"compiling steps: {variant.name}"
        tell(f"{doing} ({duration}sooner where torch's cache has it)")
        return bar(doing)

    def save_if_new(self) -> None:
        """Write newly compiled graphs and kernels to the artefact, beside what its file has."""
        if self._store is None or self._store.path is None:
            return
        if all(graph.is_loaded for graph in self.graphs.values()) and not self._store.lacks_kernels:
            return
        self._store.keep(self._ready() | self._unused(), self._choices)

    def is_final(self, variant: Variant) -> bool:
        """Tell whether a variant's step stays as it is: always, these steps are never replaced."""
        return variant in self.of

    def save(self, path: Path, variants: Iterable[Variant] | None = None) -> None:
        """Write the graphs of ready variants to an artefact; by default of all that are ready."""
        ready = self._ready()
        names = ready if variants is None else [variant.name for variant in variants]
        assert self._store is not None
        self._store.save(path, {name: ready[name] for name in names}, self._choices)

    def _ready(self) -> dict[str, tuple[CompiledGraph, GraphRecord]]:
        """Map the name of each ready variant to its graph and the graph's record."""
        return {
            variant.name: (step.graphs[0], self.graphs[variant.name])
            for variant, step in self.of.items()
            if isinstance(step, CompiledStep) and variant.name in self._place
        }

    def _unused(self) -> dict[str, tuple[CompiledGraph, GraphRecord]]:
        """Map names of variants that no step has needed so far to their graphs in the artefact."""
        assert self._store is not None
        unused = [v for v in self.of if v.name not in self._place and self._store.has([v.name])]
        found = {v.name: self._store.find(v.name, self._inputs(v), self._choices) for v in unused}
        return {name: each for name, each in found.items() if each is not None}

    def _inputs(self, variant: Variant) -> Inputs:
        """Build the inputs on which a variant is traced, on the model's device."""
        traced = self._planner.traced(variant)
        return map_tensors(lambda leaf: leaf.to(self._model.device), traced)

    def _trace(
        self, step: CompiledStep, inputs: Inputs, variant: Variant, first: Inputs | None
    ) -> None:
        """Trace and compile a step once for inputs of all sizes.

        Raises:
            UnsupportedError: torch.compile was switched off after the runner was made.
        """
        if setting := switched_off_by():
            raise UnsupportedError(
                f"a step of a runner with compile=True is to be compiled, and {setting} switches "
                f"torch.compile off: set it before the runner is made, or not before warm_up()"
            )
        device, padding = self._model.device, None
        if device.type == "cuda":
            start_workers()
            if first is not None:
                padding = map_tensors(lambda leaf: torch.zeros_like(leaf, device=device), first)
        building = self._backends[variant.mode].building_for(padding)
        with building, self._tracing(inputs, variant), torch.inference_mode():
            if variant.mode.num_chained:  # the draft head's layers are not traced once for all
                step.trace(inputs, self._caches)
            else:
                self.layers.trace(lambda: step.trace(inputs, self._caches))

    @contextmanager
    def _tracing(self, inputs: Inputs, variant: Variant) -> Iterator[None]:
        """Hold the model alone, with a variant's choices and hooks, to trace it for inputs."""
        for part in inputs.parts:
            if part.batch.positions.ndim == 2:
                torch._dynamo.mark_static(part.batch.positions, 0)
        attached = self._attached_to(variant)
        tracing = self._use.tracing(self._model, self._module_choices, attached)
        with compiling(), tracing, named_failures():
            yield


def _step_of(model: Model, variant: Variant, adapted: AdaptedLayers | None) -> StepFunction:
    if not variant.mode.num_chained:
        return make_step(model, adapted if variant.has_adapters else None)
    assert isinstance(model, DraftingModel)
    return make_draft_step(model)


def _count_graph_breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())
