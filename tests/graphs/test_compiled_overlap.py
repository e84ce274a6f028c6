"""A compiled runner with overlap: one graph in halves for each kind of step, and its schedule in
the code that runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.tiny_models import VOCAB_SIZE, make_hybrid
from torch_hybrid.backends.mode import MODES, Mode
from torch_hybrid.graphs.passes import DEFAULT_PASSES, Pass, keep_order, without
from torch_hybrid.graphs.passes.schedule import Stage
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.ops.core.capability import Implementation
from torch_hybrid.ops.core.declaration import Declaration
from torch_hybrid.ops.core.declare import Op

pytestmark = pytest.mark.slow
SIZES = {"max_seqs": 6, "max_tokens": 160, "kv_tokens": 800}
STEPS = [
    [100, 3, 1, 0, 0, 0],
    [1, 1, 1, 0, 0, 0],
    [1, 0, 0, 90, 2, 1],
    [1, 1, 1, 1, 1, 1],
    [4, 4, 4, 4, 4, 4],
    [1, 0, 0, 0, 0, 0],
    [2, 0, 0, 0, 0, 0],
    [0, 0, 0, 33, 0, 64],
    [26, 26, 26, 26, 26, 26],
    [0, 1, 0, 1, 0, 1],
]
# Of which a runner needs one graph.
PREFILLS = [step for step in STEPS if max(step) > 1]


@dataclass(frozen=True)
class Scheduled:
    """A warm runner, and the halves and stages of each kernel of its decode step."""

    runner: Runner
    places: list[set[tuple[int, int]]]


@pytest.fixture(scope="module")
def model() -> th.HybridModel:
    """A layer of each of two mixers, one after the other."""
    return make_hybrid("qwen3_next_dense")


@pytest.fixture(scope="module")
def compiled(model: th.HybridModel) -> Scheduled:
    """Kernels of decode are looked at as they are made, whatever a cache holds."""
    places: list[set[tuple[int, int]]] = []

    def look(nodes: list[object]) -> list[object]:
        places.extend(keep_order._places(node) for node in nodes)
        return nodes

    runner = Runner(model, **SIZES, two_batch_overlap="on")
    [seq] = runner.new_sequences(1)
    with torch._inductor.config.patch(_post_fusion_custom_pass=look, fx_graph_cache=False):
        runner.extend([seq], [[1]])
    runner.free([seq])
    runner.warm_up()
    return Scheduled(runner, places)


@pytest.fixture
def scheduled(compiled: Scheduled) -> Runner:
    return compiled.runner


@pytest.fixture(scope="module")
def in_order(model: th.HybridModel) -> Runner:
    """Of the same split, without the schedule."""
    return prefilling(model, without(DEFAULT_PASSES, ["interleave_halves"]))


def prefilling(model: th.HybridModel, passes: Sequence[Pass]) -> Runner:
    """A runner with the graph of PREFILLS and no other."""
    runner = Runner(model, **SIZES, two_batch_overlap="on", passes=passes)
    [seq] = runner.new_sequences(1)
    runner.extend([seq], [[1, 2]])
    runner.free([seq])
    return runner


def serve(runner: Runner, steps: list[list[int]]) -> list[Tensor]:
    """The logits of some steps; a recompile is an error."""
    rng = random.Random(0)
    seqs = runner.new_sequences(len(steps[0]))
    outputs = []
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in steps:
            rows = [row for row, n in enumerate(step) if n]
            tokens = [[rng.randrange(VOCAB_SIZE) for _ in range(step[row])] for row in rows]
            kind = ("last", "all")[len(outputs) % 2]
            outputs.append(runner.extend([seqs[row] for row in rows], tokens, logits=kind))
    runner.free(seqs)
    return outputs


def test_every_batch_is_served_by_two_graphs(model: th.HybridModel, scheduled: Runner):
    whole = Runner(model, **SIZES, compile=False)
    for actual, expected in zip(serve(scheduled, STEPS), serve(whole, STEPS), strict=True):
        assert actual.shape == expected.shape
        error = (actual - expected).abs().max() / expected.abs().max()
        assert error < 2e-5, f"overlap and none differ by {error:.1e}"
    assert scheduled.extend([], []).shape == (0, VOCAB_SIZE)
    report = scheduled.report()
    assert list(report.graphs) == ["decode, in halves", "extend, in halves"]
    assert (report.recompiles, report.graph_breaks, report.pool_clones) == (0, 0, ())
    for graph in report.graphs.values():
        assert sum(graph.regions) == len(graph.schedule)
        assert len(graph.regions) < sum(graph.regions)  # the halves share them


def test_scheduled_is_bitwise_unscheduled(scheduled: Runner, in_order: Runner):
    """The schedule moves work and changes nothing."""
    assert not any(graph.schedule for graph in in_order.report().graphs.values())
    for actual, expected in zip(serve(scheduled, PREFILLS), serve(in_order, PREFILLS), strict=True):
        assert torch.equal(actual, expected)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Names of the mixer ops as they run, and where their offsets of sequences lie."""
    made: list[tuple[str, int]] = []
    load = Implementation.load

    def recording(implementation: Implementation) -> Callable[..., object]:
        launch = load(implementation)

        def call(given: Op) -> object:
            declaration = Declaration(type(given))
            tensors = (getattr(given, name) for name in declaration.kinds)
            offsets = [a for a in tensors if isinstance(a, Tensor) and a.dtype is torch.int32]
            if offsets:
                made.append((declaration.name, offsets[0].data_ptr()))
            return launch(given)

        return call

    monkeypatch.setattr(Implementation, "load", recording)
    return made


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_the_compiled_code_runs_the_schedule(
    scheduled: Runner, calls: list[tuple[str, int]], mode: Mode
):
    """Each mixer is seen running on the half, and at the place, that the schedule gives it."""
    seqs = scheduled.new_sequences(4)
    scheduled.extend(seqs, [[1] * (1 if mode is Mode.DECODE else 20)] * 4)
    scheduled.free(seqs)
    stages = scheduled.report().graphs[f"{mode.name}, in halves"].schedule
    expected = [(op, stage.half) for stage in stages for op in stage.ops if op != "linear"]
    first = calls[0][1]
    assert [(name, int(offsets != first)) for name, offsets in calls] == expected
    halves = [stage.half for stage in stages]
    assert halves != sorted(halves), "the halves are not interleaved"


def test_no_kernel_is_of_both_halves(compiled: Scheduled):
    """Inductor would fuse the halves' norms through their weight; each is its own kernel."""
    assert len(compiled.places) > 10
    assert {len(places) for places in compiled.places} <= {0, 1}
    assert {half for places in compiled.places for half, _ in places} == {0, 1}


def test_the_report_has_the_schedule(scheduled: Runner):
    for graph in scheduled.report().graphs.values():
        assert all(isinstance(stage, Stage) for stage in graph.schedule)
        assert [r.name for r in graph.passes] == [p.name for p in DEFAULT_PASSES]
        interleaved = graph.passes[-1]
        assert interleaved.nodes_before == interleaved.nodes_after
