"""Compiled steps: one graph for all sizes, never another step's, and a record of what is in it."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from tests.devices import needs_cuda
from torch_hybrid.graphs.compiling.compile import CompileLog, StepBackend, compile_step
from torch_hybrid.graphs.compiling.compile_region import built_together
from torch_hybrid.graphs.passes import DEFAULT_PASSES, Pass
from torch_hybrid.ops.causal_conv1d import causal_conv1d
from torch_hybrid.ops.linear.op import linear

WIDTH = 8


@dataclass(frozen=True)
class Statics:
    scale: float


@dataclass(frozen=True)
class Inputs:
    x: Tensor
    statics: Statics


pytree.register_constant(Statics)
pytree.register_dataclass(Inputs)


def compiled(
    step: Callable[[Inputs, Any], Tensor], pool_sizes: set[int] | None = None
) -> tuple[Callable[[Inputs, Any], Tensor], CompileLog]:
    log = CompileLog()
    return compile_step(step, StepBackend(log, pool_sizes=pool_sizes or set())), log


def inputs(num_tokens: int, scale: float = 2) -> Inputs:
    return Inputs(torch.randn(num_tokens, WIDTH), Statics(scale))


def test_cached_code_is_for_vectors_of_one_width(monkeypatch: pytest.MonkeyPatch):
    """What Inductor wrote for AVX2 and builds for AVX-512 writes past the end of its results."""

    def hits() -> int:
        before = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
        step, _ = compiled(make_step(squared=True))
        step(inputs(3), torch.ones(WIDTH))
        return int(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]) - before

    hits()
    assert hits() == 1
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: str(uuid4()))
    assert hits() == 0


def test_kernels_of_all_regions_are_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch):
    """Those that another thread of the process compiles are waited for where they are loaded."""
    waits: list[str] = []
    monkeypatch.setattr(AsyncCompile, "wait", lambda _, scope: waits.append(scope["name"]))
    own = AsyncCompile.wait
    with built_together():
        AsyncCompile().wait({"name": "first"})
        AsyncCompile().wait({"name": "second"})
        assert waits == []
        other = Thread(target=AsyncCompile().wait, args=({"name": "another's"},))
        other.start()
        other.join()
        assert waits == ["another's"]
    assert waits == ["another's", "first", "second"]
    assert AsyncCompile.wait is own


def make_step(*, squared: bool) -> Callable[[Inputs, Tensor], Tensor]:
    def step(inputs: Inputs, caches: Tensor) -> Tensor:
        y = inputs.x * inputs.statics.scale + caches
        return y * y if squared else y

    return step


def test_a_graph_serves_all_sizes_and_its_own_constants():
    step = make_step(squared=False)
    run, log = compiled(step)
    caches = torch.randn(WIDTH)
    run(inputs(5), caches)
    with torch.compiler.set_stance("fail_on_recompile"):
        for num_tokens in (2, 3, 16, 17, 300):
            given = inputs(num_tokens)
            assert torch.equal(run(given, caches), step(given, caches))
    given = inputs(5, scale=3)
    assert torch.equal(run(given, caches), step(given, caches))
    assert len(log.graphs) == 2


@needs_cuda
def test_a_product_of_odd_widths_serves_all_sizes_on_a_gpu():
    weight, bias = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((17, 256), (17,)))

    def step(inputs: Inputs, caches: Tensor) -> Tensor:
        return torch.addmm(bias, inputs.x, weight.t()) * inputs.statics.scale + caches

    run, log = compiled(step)
    caches = torch.zeros(17, device="cuda", dtype=torch.bfloat16)
    for tensor in (weight, bias):  # as parameters are
        torch._dynamo.mark_static(tensor)
    for num_tokens in (512, 2, 16, 300):
        x = torch.randn(num_tokens, 256, device="cuda").bfloat16()
        given = Inputs(x, Statics(2))
        torch.testing.assert_close(run(given, caches), step(given, caches))
    assert len(log.graphs) == 1


def test_a_step_whose_sizes_fit_runs_without_dynamo():
    def step(inputs: Inputs, caches: Tensor) -> Tensor:
        return inputs.x + caches if inputs.x.shape[0] < 10 else inputs.x - caches

    run, log = compiled(step)
    traced: list[int] = []
    of_dynamo = run._trace
    run._trace = lambda given, caches: (traced.append(len(given.x)), of_dynamo(given, caches))[1]
    caches = torch.randn(WIDTH)
    for num_tokens in (5, 7, 12, 300, 9, 10):
        given = inputs(num_tokens)
        for _ in range(2):
            assert torch.equal(run(given, caches), step(given, caches))
    assert traced == [5, 12]
    assert len(log.graphs) == 2


def test_sizes_that_were_equal_when_traced_must_stay_so():
    def step(inputs: tuple[Tensor, Tensor], caches: Tensor) -> Tensor:
        return torch.cat([x + caches for x in inputs])

    run, log = compiled(step)
    caches = torch.randn(WIDTH)
    for lengths in ((5, 5), (7, 7), (5, 6), (9, 9), (9, 4)):
        given = tuple(torch.randn(n, WIDTH) for n in lengths)
        assert torch.equal(run(given, caches), step(given, caches))
    assert len(log.graphs) == 2


def test_what_a_step_reads_goes_with_it():
    """Dynamo has compiled functions for as long as the process lives."""

    def of_a_step() -> list[weakref.ref[Tensor]]:
        weight, caches = torch.randn(2, WIDTH).unbind()

        def step(inputs: Inputs, caches: Tensor) -> Tensor:
            return inputs.x * weight + caches

        run, _ = compiled(step)
        run(inputs(5), caches)
        return [weakref.ref(weight), weakref.ref(caches)]

    read = of_a_step()
    gc.collect()
    assert [each() for each in read] == [None, None]


def test_floats_are_constants_whenever_a_step_is_traced():
    """An op takes no tensor for a number, and a step that comes late is traced as the first."""
    seen = []
    look = Pass("look", lambda graph: seen.append(torch._dynamo.config.specialize_float))
    log = CompileLog()
    run = compile_step(make_step(squared=False), StepBackend(log, pool_sizes=(), passes=[look]))
    caches = torch.randn(WIDTH)
    for scale in (2.0, 3.0):
        run(inputs(5, scale=scale), caches)
    assert seen == [True, True]
    assert not torch._dynamo.config.specialize_float


def test_integers_of_any_object_are_constants():
    """As an input, one would have a graph that Dynamo alone can call."""

    class Holder:
        offset = 3

    def step(inputs: Inputs, caches: Tensor) -> Tensor:
        return inputs.x + holder.offset * caches

    holder = Holder()
    run, _ = compiled(step)
    caches, given = torch.randn(WIDTH), inputs(5)
    assert torch.equal(run(given, caches), step(given, caches))
    assert run.fits(given)


def test_steps_of_one_def_do_not_share_graphs():
    """As the steps of one runner do: they have one backend, and close over different values."""
    backend = StepBackend(CompileLog(), pool_sizes=())
    first, second = make_step(squared=False), make_step(squared=True)
    run_first, run_second = compile_step(first, backend), compile_step(second, backend)
    given, caches = inputs(5), torch.randn(WIDTH)
    for _ in range(2):
        assert torch.equal(run_first(given, caches), first(given, caches))
        assert (run_second(given, caches) - second(given, caches)).abs().max() < 1e-4


def conv_step(inputs: Inputs, caches: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    weight, state, index = caches
    cu_seqlens = torch.stack([index[0] * 0, index[0] * 0 + inputs.x.shape[0]])
    options = {"activation": "silu", "impl": "torch"}
    y = causal_conv1d(inputs.x, weight, None, state, cu_seqlens, index * 0, index, **options)
    return causal_conv1d(y, weight, None, state, cu_seqlens, index, index, **options)


def test_the_record_of_a_graph():
    caches = torch.randn(WIDTH, 4), torch.zeros(64, 3, WIDTH), torch.ones(1, dtype=torch.int32)
    run, log = compiled(conv_step, {caches[1].numel()})
    run(inputs(5), caches)
    [record] = log.graphs
    assert record.ops == Counter({"causal_conv1d[torch]": 2})
    assert record.pool_clones == ()
    assert record.seconds > 0
    assert record.num_nodes >= 2
    assert [r.name for r in record.passes] == [p.name for p in DEFAULT_PASSES]
    assert record.schedule == ()


def test_a_clone_is_in_the_record():
    def step(inputs: Inputs, caches: Tensor) -> Tensor:
        before = caches.clone()
        caches.add_(inputs.x.sum())
        return before

    run, log = compiled(step, {999 * WIDTH})
    pool = torch.zeros(999, WIDTH)
    run(inputs(5), pool)
    [record] = log.graphs
    assert len(record.pool_clones) == 1


def test_a_graph_break_is_an_error():
    def step(inputs: Inputs, caches: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return inputs.x + caches

    run, _ = compiled(step)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        run(inputs(5), torch.zeros(WIDTH))


def test_ops_are_called_past_the_dispatcher_unless_it_is_watched(monkeypatch: pytest.MonkeyPatch):
    def step(inputs: Inputs, caches: Tensor) -> Tensor:
        return linear(inputs.x, [caches], [None], impl="cpp")

    run, _ = compiled(step)
    given, weight = inputs(3), torch.randn(WIDTH, WIDTH)
    expected = run(given, weight)
    calls: list[str] = []
    op = torch.ops.torch_hybrid.linear
    direct = op.direct

    def count(*args: Any, **options: Any) -> Any:
        calls.append("direct")
        return direct(*args, **options)

    monkeypatch.setattr(op, "direct", count)
    assert torch.equal(run(given, weight), expected)
    assert calls == ["direct"]
    with FlopCounterMode(display=False) as counter:
        run(given, weight)
    assert counter.get_total_flops() == 2 * 3 * WIDTH * WIDTH
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run(given, weight)
    assert "torch_hybrid::linear" in {event.name for event in seen.events()}
