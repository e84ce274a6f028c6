"""Steps that run eagerly until their graphs are compiled: compile="background".

    on a CPU     a forked process compiles, and leaves an artefact for each variant. Eager steps run
                 undisturbed by the interpreter's lock, and weights are in memory once. The process
                 pauses during the first step, and shares the cores after it: compiled steps
                 gain more time than compiling takes from the eager ones
    elsewhere    a process that has used CUDA cannot be forked: a thread compiles, from a copy of
                 the model's modules that has the same tensors. All variants switch together, as
                 no step can be captured in a CUDA graph while a thread loads kernels.

In both cases a thread collects compiled steps, and ``prepare`` takes them up: a switch always falls
between two steps, in the thread that runs them. A failure is told once, as a warning, and steps
stay eager.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread, current_thread
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from torch_hybrid.errors import UnsupportedError
from torch_hybrid.graphs.artefact.store import StepStore
from torch_hybrid.graphs.compiling.compile import GraphRecord
from torch_hybrid.graphs.compiling.forked import Forked, ForkedError, can_fork
from torch_hybrid.graphs.compiling.toolchain import check_cache, missing_tools
from torch_hybrid.graphs.step import Inputs, Model, Variant
from torch_hybrid.graphs.stepping.steps import Steps, be_alone, compiling
from torch_hybrid.host.copies import copy_modules
from torch_hybrid.host.progress import bar, tell
from torch_hybrid.host.surroundings import isolated
from torch_hybrid.ops.native.ahead import Builds

Compile = bool | Literal["background"]
_INTERVAL = 0.05  # seconds between looks at what is built
_SECONDS = 60  # to compile a step as in steps.py, while eager steps run


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """State of the switch from eager to compiled steps, with compile="background".

    Attributes:
        seconds: time from the making of the runner to the first compiled step of each variant, by
            the variant's name.
        num_eager: number of steps that ran eagerly.
        failed: why the other variants stay eager; empty if nothing failed so far.
    """

    seconds: Mapping[str, float]
    num_eager: int
    failed: str


class MakeSteps(Protocol):
    """Maker of a runner's steps, given the model to run and the artefact of compiled steps."""

    def __call__(self, model: Model, *, store: StepStore | None) -> Steps: ...


def check_compile(compile: Compile, model: Model) -> None:
    """Raise UnsupportedError where ranks would switch to compiled steps at different steps."""
    if compile == "background" and model.ranks is not None and model.ranks.size > 1:
        raise UnsupportedError(
            f"compile='background' serves a model of one rank, got {model.ranks.size}: each would "
            f"switch at another step, and compiled steps send their messages in another order"
        )


class BackgroundSteps:
    """Steps of a runner, used like ``Steps``: eager until the compiled ones are ready.

    Compiling begins at once, and ends with ``close`` or when all variants are compiled.

    Args:
        make: makes the runner's steps.
        model: the model that the steps run.
        store: artefact that may hold compiled steps, and to which new ones are written.
        builds: builds of the native kernels. Eager steps wait for these, so kernels are built first
            and with all cores.
    """

    def __init__(self, make: MakeSteps, model: Model, store: StepStore, builds: Builds) -> None:
        self._start = time.perf_counter()
        self._make, self._model, self._store, self._builds = make, model, store, builds
        self._eager = make(model, store=None)
        self._compiled: Steps | None = None
        self._brought: dict[Variant, GraphRecord] = {}  # compiled, and not taken up yet
        self._switched: dict[Variant, float] = {}
        self._num_eager, self._failed, self._is_told = 0, "", False
        self._is_over, self._is_closed = Event(), False
        self._child: Forked | None = None
        self._folder = TemporaryDirectory(prefix="torch_hybrid_steps_")
        is_there = store.has(variant.name for variant in self._eager.of)
        if not is_there:
            duration = f", in about {_SECONDS} s" if model.device.type == "cpu" else ""
            tell(f"steps run uncompiled until they are compiled beside them{duration}")
        uses_cuda = model.device.type != "cpu" or torch.cuda.is_initialized()
        if can_fork() and not uses_cuda and not is_there:
            folder = Path(self._folder.name)
            with compiling():  # no other thread compiles while this process is forked
                self._child = Forked(lambda: _compiled_files(make, model, store, folder))
        self._thread = Thread(
            target=copy_context().run,  # with torch's configs as its caller has them
            args=(self._bring,),
            name="torch_hybrid compile",
            daemon=True,
        )
        self._thread.start()

    @property
    def graphs(self) -> dict[str, GraphRecord]:
        """Records of the graphs of compiled variants, by the variant's name."""
        return {} if self._compiled is None else self._compiled.graphs

    @property
    def recompiles(self) -> int:
        """Graphs beyond the one that each variant needs."""
        return 0 if self._compiled is None else self._compiled.recompiles

    @property
    def graph_breaks(self) -> int:
        """Number of graph breaks in this process since these steps were made."""
        return self._eager.graph_breaks

    @property
    def switches(self) -> Switches:
        """Variants that run compiled by now, and the number of eager steps."""
        seconds = {variant.name: after for variant, after in self._switched.items()}
        return Switches(seconds=seconds, num_eager=self._num_eager, failed=self._failed)

    def is_ready(self, variant: Variant) -> bool:
        """Tell whether ``prepare`` has neither a compiled step nor a warning for a variant."""
        return variant not in self._brought and not self._must_warn

    def prepare(self, variant: Variant, _first: Inputs | None = None) -> GraphRecord | None:
        """Take up a variant's compiled step if it is ready.

        Returns:
            The record of its graph; None if there is nothing new.
        """
        if self._must_warn:
            self._is_told = True
            warnings.warn(self._failed, stacklevel=3)
        record = self._brought.pop(variant, None)
        if record is not None:
            self._switched[variant] = time.perf_counter() - self._start
        return record

    @property
    def _must_warn(self) -> bool:
        """Flag: compiling has failed, and the user was not told yet."""
        return bool(self._failed) and not self._is_told and not self._is_closed

    def is_final(self, variant: Variant) -> bool:
        """Tell whether a variant's step is compiled; an eager one will be replaced."""
        return variant in self._switched

    def running(self, variant: Variant) -> AbstractContextManager[Callable[[Inputs], Tensor]]:
        """Hold the model for a step, eager or compiled, and yield the function that runs it."""
        if variant in self._switched:
            assert self._compiled is not None
            return self._compiled.running(variant)
        self._num_eager += 1
        return self._running_eagerly(variant)

    def build_kernels(self, variant: Variant, inputs: Inputs) -> None:
        """Build the kernels of the ops that a variant's step of padding calls, many at once."""
        if variant in self._switched:
            assert self._compiled is not None
            self._compiled.build_kernels(variant, inputs)

    @contextmanager
    def _running_eagerly(self, variant: Variant) -> Iterator[Callable[[Inputs], Tensor]]:
        is_first, child = self._num_eager == 1, self._child
        with ExitStack() as stack:
            if is_first and child is not None and not self._is_over.is_set():
                stack.enter_context(child.paused())
            yield stack.enter_context(self._eager.running(variant))

    def wait(self) -> None:
        """Wait until all variants are compiled.

        Raises:
            UnsupportedError: compiling failed, or the steps were closed before it ended.
        """
        with nullcontext() if self._is_over.is_set() else bar("compiling the steps"):
            self._is_over.wait()
        if self._failed:
            self._is_told = True
            raise UnsupportedError(self._failed)

    def save_if_new(self) -> None:
        """Do nothing: the process or thread that compiled has written the artefact."""

    def save(self, path: Path) -> None:
        """Write the graphs of all variants, which are compiled, to an artefact."""
        assert self._compiled is not None
        self._compiled.save(path)

    def close(self) -> None:
        """Stop compiling, and leave all steps as they are.

        The forked process ends at once, with its compilers; a thread ends after the variant that it
        compiles.
        """
        self._is_closed = True
        if self._child is not None:
            self._child.close()
        if self._thread is not current_thread():  # that thread may collect this object as garbage
            self._thread.join()
        self._folder.cleanup()

    def _bring(self) -> None:
        """Collect compiled variants as they become ready, or note a failure: the thread's work."""
        try:
            self._bring_all()
        except (EOFError, ForkedError) as error:
            self._failed = f"steps stay uncompiled: {str(error) or 'the runner was closed'}"
        except Exception as error:  # raised by any pass or compiler: steps stay eager
            self._failed = f"steps stay uncompiled: {_in_one_line(error)}"
        finally:
            if self._child is not None:
                self._child.close()
            self._is_over.set()

    def _bring_all(self) -> None:
        child, store = self._child, self._store
        if child is not None:
            with child.paused():
                while not (self._builds.are_done or self._is_closed):
                    time.sleep(_INTERVAL)
        model = self._model if child is not None else _same_tensors(self._model)
        self._compiled = steps = self._make(model, store=store)
        brought = {}
        for variant in steps.of:
            if child is not None:
                store.open(Path(str(child.receive())))
                record = steps.prepare(variant)
            else:
                with _prepared(model, store):
                    record = steps.prepare(variant, tells=False)
                steps.save_if_new()
            assert record is not None
            brought[variant] = record
            if self._is_closed:
                raise EOFError
            if child is not None:
                self._brought[variant] = record
        if child is not None:
            with suppress(EOFError):  # closed: every variant has been received
                child.receive()  # wait until the process has written the runner's own artefact
        else:
            self._brought.update(brought)


def _compiled_files(make: MakeSteps, model: Model, store: StepStore, folder: Path) -> Iterator[str]:
    """Compile all variants in the forked process.

    Yields:
        The path of an artefact for each variant; at last the path of their folder, once the
        runner's own artefact is written too.
    """
    be_alone()
    try:
        with _prepared(model, store):
            steps = make(model, store=store)
            for number, variant in enumerate(steps.of):
                steps.prepare(variant)
                path = folder / str(number)
                steps.save(path, [variant])
                yield str(path)
                steps.save_if_new()
            yield str(folder)
    except Exception as error:  # raised by any pass or compiler; its first line is told
        raise ForkedError(_in_one_line(error)) from error


@contextmanager
def _prepared(model: Model, store: StepStore) -> Iterator[None]:
    """Check that the machine can compile, and isolate torch's settings meanwhile.

    Raises:
        UnsupportedError: a compiler or a tool is missing.
    """
    if not store.is_open:
        if missing := missing_tools(model.device):
            raise UnsupportedError(missing)
        check_cache()
    with isolated():
        yield


def _same_tensors(model: Model) -> Model:
    """Copy a model's modules but not its tensors: a trace takes layers out of the copy."""
    return copy_modules(model, {}) if isinstance(model, nn.Module) else model


def _in_one_line(error: Exception) -> str:
    from torch._dynamo.exc import BackendCompilerFailed

    cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
    first, *_ = [*str(cause).strip().splitlines(), ""]
    return first if isinstance(cause, UnsupportedError) else f"{type(cause).__name__}: {first}"
