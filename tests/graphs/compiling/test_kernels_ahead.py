"""Calls of ops by threads, ahead of the step's own, on padding of the step's sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from threading import current_thread, main_thread

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_hybrid.graphs.compiling.compile import CompileLog, StepBackend, compile_step
from torch_hybrid.graphs.compiling.compiled_step import CompiledStep
from torch_hybrid.ops.core.registration import NAMESPACE

WIDTH = 4
NAME = f"{NAMESPACE}::called_ahead_in_tests"


@dataclass(frozen=True)
class Inputs:
    x: Tensor


pytree.register_dataclass(Inputs)


@dataclass(frozen=True)
class Call:
    """What the op was called on, and by whom."""

    x: list[list[float]]
    strides: tuple[int, ...]
    is_pool: bool
    is_ahead: bool


@dataclass(frozen=True)
class Step:
    """A step that calls an op on two values alike, on one with other strides, and in torch."""

    compiled: CompiledStep
    backend: StepBackend
    pool: Tensor
    calls: list[Call]

    def ahead(self) -> list[Call]:
        return [call for call in self.calls if call.is_ahead]


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Iterator[Step]:
    monkeypatch.setattr("torch_hybrid.graphs.compiling.direct_calls.direct_calls", dict)
    torch._dynamo.reset()
    pool, calls = torch.ones(WIDTH), list[Call]()
    with torch.library._scoped_library(NAMESPACE, "FRAGMENT"):

        @torch.library.custom_op(NAME, mutates_args=("state",))
        def op(x: Tensor, state: Tensor, factor: int, *, impl: str) -> Tensor:
            is_ahead = current_thread() is not main_thread()
            is_pool = state.data_ptr() == pool.data_ptr()
            calls.append(Call(x.tolist(), x.stride(), is_pool, is_ahead))
            if is_ahead and len(x) == 13:
                raise ValueError("no padding of 13 rows")
            state += 1 - is_ahead
            return factor * x

        @op.register_fake
        def _(x: Tensor, state: Tensor, factor: int, *, impl: str) -> Tensor:
            return torch.empty_like(x)

        def run(inputs: Inputs, caches: Tensor) -> Tensor:
            y = op(inputs.x + 1, caches, 2, impl="triton")
            y = op(y + 1, caches, 2, impl="triton")
            wide = torch.cat([y, y], dim=1)
            y = op(wide[:, :WIDTH], caches, 2, impl="chunk_triton")
            return op(y, caches, 1, impl="torch")

        backend = StepBackend(CompileLog(), pool_sizes=(), builds_ahead=True)
        yield Step(compile_step(run, backend), backend, pool, calls)


def expected(x: Tensor) -> Tensor:
    return 2 * (2 * ((x + 1) * 2 + 1))


def padding(num_rows: int) -> Inputs:
    return Inputs(torch.zeros(num_rows, WIDTH))


def test_each_distinct_call_is_made_once_while_the_graph_is_compiled(step: Step):
    x = torch.randn(3, WIDTH)
    assert torch.equal(step.compiled(Inputs(x), step.pool), expected(x))
    assert len(step.calls) == 2 + 4
    zeros = torch.zeros(3, WIDTH).tolist()
    assert {(str(call.x), call.strides, call.is_pool) for call in step.ahead()} == {
        (str(zeros), (WIDTH, 1), True),
        (str(zeros), (2 * WIDTH, 1), True),
    }
    assert step.pool.tolist() == [5.0] * WIDTH


def test_a_trace_for_the_first_step_runs_nothing_else(step: Step):
    with step.backend.building_for(padding(6)):
        step.compiled.trace(padding(3), step.pool)
    assert [len(call.x) for call in step.calls] == [6, 6]
    assert step.pool.tolist() == [1.0] * WIDTH
    x = torch.randn(6, WIDTH)
    assert torch.equal(step.compiled(Inputs(x), step.pool), expected(x))
    assert len(step.backend.log.graphs) == 1


@pytest.mark.parametrize("num_rows", [1, 9, 13])
def test_kernels_of_another_size(step: Step, num_rows: int):
    """At 13 rows every call ahead fails, which leaves the step as it is."""
    step.compiled(padding(3), step.pool)
    step.calls.clear()
    step.compiled.build_kernels(padding(num_rows))
    assert [(len(call.x), call.is_ahead) for call in step.calls] == [(num_rows, True)] * 2
    x = torch.randn(num_rows, WIDTH)
    assert torch.equal(step.compiled(Inputs(x), step.pool), expected(x))
