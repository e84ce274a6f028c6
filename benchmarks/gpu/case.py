"""One op at one shape, as data, and the runner that measures every contestant of it.

A contestant is handed the inputs of all turns and returns a call for each. What it needs in
another layout it makes there, outside of what is timed. Its first result is compared with that of
implementation "torch" on the same tensors before any is timed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from benchmarks.gpu.clock import Call, Rates, num_turns, time_of
from torch_hybrid.ops.core.capability import Implementation, Need
from torch_hybrid.ops.core.planning import Planned, Planner

BF16 = torch.bfloat16
WORKSPACE_BYTES = 256 * 2**20
TOLERANCE = 2e-2  # of the largest output: bfloat16, rounded on different ways


class Absent(Exception):
    """A contestant does not run here; the text says why."""


class Inputs:
    """Tensors of one call; a subclass is a frozen dataclass that names them.

    ``changed`` names the tensors that a call updates, where its next result depends on them.
    """

    changed: ClassVar[tuple[str, ...]] = ()

    @property
    def num_bytes(self) -> float:
        """What a call must move."""
        raise NotImplementedError

    @property
    def flops(self) -> float:
        """What a call must compute with tensor cores; 0 where memory is the floor anyway."""
        return 0.0

    def plan(self, planner: Planner) -> Planned:
        """What a planner makes of the call's lengths, for an implementation that plans."""
        raise Absent("what it plans is not made here")

    def another(self) -> Self:
        """The same in memory of its own. Indices are shared: who keeps plans of them finds them."""
        own = {
            f.name: value.clone()
            for f in fields(self)  # type: ignore[arg-type]
            if isinstance(value := getattr(self, f.name), Tensor) and value.is_floating_point()
        }
        return replace(self, **own)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """A call for the inputs of each turn, and what of its result is compared."""

    calls: Sequence[Call]
    output: Callable[[Any], Tensor] = field(default=lambda result: result)


Contestant = Callable[[Sequence[Any]], Turns]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a runner asks when it chooses among ``own``: the op, the execution form of its mode,
    the sizes of a layer, features."""

    op: str
    form: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table.

    Attributes:
        op: what is computed, "GDN prefill".
        model: whose layer has these sizes.
        shape: sequences and tokens.
        make: the inputs of the first turn.
        reference: the result that all others must agree with.
        own: this package's implementations, by name.
        others: by name.
        choice: where a runner chooses among ``own`` by what is measured.
    """

    op: str
    model: str
    shape: str
    make: Callable[[], Inputs]
    reference: Callable[[Any], Tensor]
    own: Mapping[str, Contestant]
    others: Mapping[str, Contestant] = field(default_factory=dict)
    choice: Choice | None = None

    def __str__(self) -> str:
        return f"{self.op}, {self.model}, {self.shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Microseconds of one contestant, or why there are none."""

    us: float | None = None
    captured: bool = True
    error: float | None = None  # of its largest difference, in units of the largest output
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What was measured of a case."""

    op: str
    model: str
    shape: str
    floor_us: float
    bound: str  # "bytes" or "FLOPs"
    own: Mapping[str, Cell]
    others: Mapping[str, Cell]
    choice: Choice | None = None

    @property
    def best(self) -> str | None:
        """The fastest of this package's implementations."""
        return fastest(self.own)

    @property
    def cells(self) -> dict[str, Cell]:
        """All by name: a package that we call too stands for itself as "its name alone"."""
        others = {f"{n} alone" if n in self.own else n: cell for n, cell in self.others.items()}
        return {**self.own, **others}


def fastest(cells: Mapping[str, Cell]) -> str | None:
    """The name of the fastest, or None where nothing was measured."""
    times = {name: cell.us for name, cell in cells.items() if cell.us is not None}
    return min(times, key=times.__getitem__) if times else None


def own(
    implementations: Mapping[str, Implementation],
    call: Callable[..., Tensor],
    *,
    features: tuple[str, ...] = (),
) -> dict[str, Contestant]:
    """This package's implementations for GPUs, but "torch", which only if there is no other.

    ``call`` takes inputs and a name, and of an implementation that plans what was planned.
    """
    on_gpus = [name for name, i in implementations.items() if "cuda" in i.capability.devices]
    names = [name for name in on_gpus if not name.endswith("torch")] or on_gpus

    def turns(name: str, inputs: Sequence[Any]) -> Turns:
        need = Need(device=torch.device("cuda"), dtype=BF16, features=frozenset(features))
        if reasons := implementations[name].capability.why_not(need):
            raise Absent("; ".join(reasons))
        options: dict[str, Sequence[Tensor]] = {}
        if (planner := implementations[name].load_planner()) is not None:
            planned = inputs[0].plan(planner)  # turns share their lengths
            values = torch.tensor(planned.values, device="cpu")
            options["planned"] = [*(tensor.cuda() for tensor in planned.tensors), values]
        return Turns(calls=[partial(call, each, name, **options) for each in inputs])

    return {name: partial(turns, name) for name in names}


def installed(package: str, module: str) -> ModuleType:
    """A module of a package that may be missing."""
    if importlib.util.find_spec(package) is None:
        raise Absent(f"{package} is not installed")
    return importlib.import_module(module)


def flashinfer_workspace(like: Tensor) -> Tensor:
    """What its wrappers are handed, zeros at first."""
    return like.new_zeros(WORKSPACE_BYTES, dtype=torch.uint8)


def randn(*shape: int) -> Tensor:
    """bfloat16."""
    return torch.randn(*shape).to(BF16)


def offsets(num_seqs: int, num_new: int) -> Tensor:
    """cu_seqlens of sequences of equal lengths."""
    return torch.arange(num_seqs + 1, dtype=torch.int32) * num_new


def measure(case: Case, rates: Rates, *, device: str = "cuda") -> Line:
    """Compare and time every contestant of a case."""
    with torch.device(device):
        first = case.make()
    inputs = [first, *(first.another() for _ in range(num_turns(first.num_bytes) - 1))]
    with _unchanged(first):
        expected = case.reference(first).float()
    own, others = (
        {name: _cell(contestant, inputs, expected) for name, contestant in contestants.items()}
        for contestants in (case.own, case.others)
    )
    return Line(
        op=case.op,
        model=case.model,
        shape=case.shape,
        floor_us=rates.floor(first.num_bytes, first.flops),
        bound="FLOPs" if first.flops / rates.flops > first.num_bytes / rates.num_bytes else "bytes",
        own=own,
        others=others,
        choice=case.choice,
    )


@contextmanager
def _unchanged(inputs: Inputs) -> Iterator[None]:
    """Give a call's inputs their state back after it."""
    states = [getattr(inputs, name) for name in inputs.changed]
    before = [state.clone() for state in states]
    try:
        yield
    finally:
        for state, kept in zip(states, before, strict=True):
            state.copy_(kept)


def _cell(contestant: Contestant, inputs: Sequence[Inputs], expected: Tensor) -> Cell:
    try:
        with _unchanged(inputs[0]):
            turns = contestant(inputs)
            error = _error(turns.output(turns.calls[0]()), expected)
            if not error <= TOLERANCE:
                why_not = f"its result is {error:.1e} of the largest output off"
                return Cell(error=error, why_not=why_not)
            time = time_of(turns.calls)
    except Absent as absent:
        return Cell(why_not=str(absent))
    # Whatever a foreign kernel, its compiler or its launcher raises is a blank cell with a reason:
    # the other figures of the run stand.
    except Exception as error:
        return Cell(why_not=f"{type(error).__name__}: {_first_line(error)}")
    return Cell(us=time.us, captured=time.captured, error=error)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:160]


def _error(out: Tensor, expected: Tensor) -> float:
    if out.shape != expected.shape:
        raise ValueError(f"its result is {list(out.shape)}, not {list(expected.shape)}")
    difference = (out.float() - expected).abs().max() / expected.abs().max()
    return difference.item()
