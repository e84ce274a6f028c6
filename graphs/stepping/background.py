"""Steps that run eagerly while their graphs are compiled beside them: compile="background".

    on a CPU     a forked process compiles, and leaves an artefact for each kind of step: steps run
                 beside it undisturbed by the interpreter's lock, and weights are there once. It
                 stands still during the first step, and has its share of the cores after that:
                 compiled steps are faster by more than it takes from the eager ones
    elsewhere    a process that has used CUDA cannot be forked: a thread compiles, from a copy of
                 the model's modules that has the same tensors. Kinds of steps switch together, as
                 no step can be captured in a CUDA graph while a thread loads kernels.

In both a thread brings what is ready, and the next step that is prepared takes it up: a switch is
always between two steps, in the thread that runs them. What fails is told once, as a warning, and
steps stay as they are.
"""

from __future__ import annotations

import copy
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
from torch_hybrid.graphs.compiling.signature import own_tensors
from torch_hybrid.graphs.compiling.toolchain import check_cache, missing_tools
from torch_hybrid.graphs.step import Inputs, Model, Variant
from torch_hybrid.graphs.stepping.steps import Steps, be_alone, compiling
from torch_hybrid.host.progress import bar, tell
from torch_hybrid.host.surroundings import isolated
from torch_hybrid.ops.native.ahead import Builds

Compile = bool | Literal["background"]
_INTERVAL = 0.05  # seconds between looks at what is built
_SECONDS = 60  # as in steps.py, beside eager steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """What has become of the steps of a runner with compile="background".

    Attributes:
        seconds: from when the runner was made to the first compiled step of each kind, by name.
        num_eager: steps that ran uncompiled.
        failed: why the others stay uncompiled; empty where nothing failed so far.
    """

    seconds: Mapping[str, float]
    num_eager: int
    failed: str


class MakeSteps(Protocol):
    """Makes the steps of a runner, but for what is compiled and where it is found."""

    def __call__(self, model: Model, *, store: StepStore | None) -> Steps: ...


def check_compile(compile: Compile, model: Model) -> None:
    """Raise UnsupportedError where ranks would switch to compiled steps at different steps."""
    if compile == "background" and model.ranks is not None and model.ranks.size > 1:
        raise UnsupportedError(
            f"compile='background' serves a model of one rank, got {model.ranks.size}: each would "
            f"switch at another step, and compiled steps send their messages in another order"
        )


class BackgroundSteps:
    """The steps of a runner, as ``Steps``: eager ones, until compiled ones are there.

    Compiling begins at once, and ends with ``close``, or when all is there.

    Args:
        make: the runner's steps.
        model: that they run.
        store: where compiled steps may be, and where they are written to.
        builds: of the kernels that steps call. Eager steps wait for them, so they have all cores.
    """

    def __init__(self, make: MakeSteps, model: Model, store: StepStore, builds: Builds) -> None:
        self._start = time.perf_counter()
        self._make, self._model, self._store, self._builds = make, model, store, builds
        self._eager = make(model, store=None)
        self._compiled: Steps | None = None
        self._brought: dict[Variant, GraphRecord] = {}  # and not taken up yet
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
            with compiling():  # nobody else does, while this process is copied
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
        """What is known of the compiled steps that are there, by variant's name."""
        return {} if self._compiled is None else self._compiled.graphs

    @property
    def recompiles(self) -> int:
        """Graphs beyond the one that each variant needs."""
        return 0 if self._compiled is None else self._compiled.recompiles

    @property
    def graph_breaks(self) -> int:
        """Of all that was traced in this process since."""
        return self._eager.graph_breaks

    @property
    def switches(self) -> Switches:
        """Which steps are compiled by now."""
        seconds = {variant.name: after for variant, after in self._switched.items()}
        return Switches(seconds=seconds, num_eager=self._num_eager, failed=self._failed)

    def is_ready(self, variant: Variant) -> bool:
        """Whether ``prepare`` has nothing to do for a variant just now."""
        return variant not in self._brought and not self._must_warn

    def prepare(self, variant: Variant) -> GraphRecord | None:
        """Take up a variant's compiled step if it has come, and then say what its graph is."""
        if self._must_warn:
            self._is_told = True
            warnings.warn(self._failed, stacklevel=3)
        record = self._brought.pop(variant, None)
        if record is not None:
            self._switched[variant] = time.perf_counter() - self._start
        return record

    @property
    def _must_warn(self) -> bool:
        """Whether compiling has failed, and nobody was told."""
        return bool(self._failed) and not self._is_told and not self._is_closed

    def is_final(self, variant: Variant) -> bool:
        """Whether a variant's step is not one that is exchanged: a captured one stays."""
        return variant in self._switched

    def running(self, variant: Variant) -> AbstractContextManager[Callable[[Inputs], Tensor]]:
        """A variant's step, compiled if that was taken up."""
        if variant in self._switched:
            assert self._compiled is not None
            return self._compiled.running(variant)
        self._num_eager += 1
        return self._running_eagerly(variant)

    @contextmanager
    def _running_eagerly(self, variant: Variant) -> Iterator[Callable[[Inputs], Tensor]]:
        is_first, child = self._num_eager == 1, self._child
        with ExitStack() as stack:
            if is_first and child is not None and not self._is_over.is_set():
                stack.enter_context(child.paused())
            yield stack.enter_context(self._eager.running(variant))

    def wait(self) -> None:
        """Wait until all variants are there.

        Raises:
            UnsupportedError: they could not be compiled, or were closed before.
        """
        with nullcontext() if self._is_over.is_set() else bar("compiling the steps"):
            self._is_over.wait()
        if self._failed:
            self._is_told = True
            raise UnsupportedError(self._failed)

    def save_if_new(self) -> None:
        """Nothing: whoever compiled has done so."""

    def save(self, path: Path) -> None:
        """Write the graphs of all variants, which are there, to an artefact."""
        assert self._compiled is not None
        self._compiled.save(path)

    def close(self) -> None:
        """Stop compiling: the process ends, with its compilers, and a thread when the variant that
        it compiles is done. Steps stay as they are."""
        self._is_closed = True
        if self._child is not None:
            self._child.close()
        if self._thread is not current_thread():  # which may be the one that collects garbage
            self._thread.join()
        self._folder.cleanup()

    def _bring(self) -> None:
        """Bring what is compiled, as it comes; all there is of the thread."""
        try:
            self._bring_all()
        except (EOFError, ForkedError) as error:
            self._failed = f"steps stay uncompiled: {str(error) or 'the runner was closed'}"
        except Exception as error:  # of any pass or compiler: the steps go on as they are
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
            with suppress(EOFError):  # closed: all that it was needed for is here
                child.receive()  # not ended before it has written what others will find
        else:
            self._brought.update(brought)


def _compiled_files(make: MakeSteps, model: Model, store: StepStore, folder: Path) -> Iterator[str]:
    """Compile all variants, and yield an artefact of each, and their folder when the runner's own
    artefact is written too: the work of the forked process."""
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
    except Exception as error:  # of any pass or compiler; a line of it is told
        raise ForkedError(_in_one_line(error)) from error


@contextmanager
def _prepared(model: Model, store: StepStore) -> Iterator[None]:
    """Surroundings to compile in.

    Raises:
        UnsupportedError: the machine lacks what that takes.
    """
    if not store.is_open:
        if missing := missing_tools(model.device):
            raise UnsupportedError(missing)
        check_cache()
    with isolated():
        yield


def _same_tensors(model: Model) -> Model:
    """A copy of a model's modules on the same tensors: a trace takes layers out of it."""
    if not isinstance(model, nn.Module):
        return model
    tensors = {id(t): t for module in model.modules() for _, t in own_tensors(module)}
    copied: Model = copy.deepcopy(model, tensors)
    return copied


def _in_one_line(error: Exception) -> str:
    from torch._dynamo.exc import BackendCompilerFailed

    cause = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
    first, *_ = [*str(cause).strip().splitlines(), ""]
    return first if isinstance(cause, UnsupportedError) else f"{type(cause).__name__}: {first}"
