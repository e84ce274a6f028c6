"""A compiled runner: one graph for each kind of step, whatever lengths arrive."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_hybrid as th
from tests.graphs.as_traced import run_as_traced
from tests.tiny_models import COMPILED_SIZES as SIZES
from tests.tiny_models import VOCAB_SIZE, make_hybrid
from torch_hybrid.explain import sections as explain
from torch_hybrid.graphs.compiling.layers_once import LayerCount, LayersOnce
from torch_hybrid.graphs.passes import Pass
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.sampling import Draw

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> th.HybridModel:
    return make_hybrid()


@pytest.fixture(scope="module")
def warm(model: th.HybridModel) -> Runner:
    runner = Runner(model, **SIZES)
    names: list[str] = []
    runner.warm_up(names.append)
    assert set(runner.report().graphs) == set(names)
    return runner


@pytest.fixture
def runner(warm: Runner) -> Iterator[Runner]:
    """The warm runner; a recompile is an error."""
    with torch.compiler.set_stance("fail_on_recompile"):
        yield warm
    assert (warm.free_slots, warm.free_pages) == (12, 100)


@pytest.fixture
def eager(model: th.HybridModel) -> Runner:
    return Runner(model, **SIZES, compile=False)


def make_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < 2e-5, f"compiled and eager differ by {error:.1e}"


def both(runner: Runner, eager: Runner, steps: list[list[int]]) -> None:
    """Run steps of so many tokens for each sequence (0: not in the step) on both."""
    rng = random.Random(0)
    count = len(steps[0])
    ours, theirs = runner.new_sequences(count), eager.new_sequences(count)
    for step in steps:
        rows = [row for row, n in enumerate(step) if n]
        tokens = [make_tokens(rng, step[row]) for row in rows]
        actual = runner.extend([ours[row] for row in rows], tokens)
        assert_same(actual, eager.extend([theirs[row] for row in rows], tokens))
    runner.free(ours)
    eager.free(theirs)


def test_decode_of_every_batch_size(runner: Runner, eager: Runner):
    prompts = [list(range(1, 13))]
    decode = [[1] * count + [0] * (12 - count) for count in (12, 1, 2, 3, 5, 8, 11, 1, 12)]
    both(runner, eager, prompts + decode)


@pytest.mark.parametrize(
    "lengths",
    [
        [2],
        [3, 1],
        [1, 2, 3],
        [16],
        [17, 15],
        [63, 1, 1],
        [64],
        [65, 64],
        [200, 1],
        [384],
        [32] * 12,
    ],
    ids=str,
)
def test_prompts_of_any_lengths(runner: Runner, eager: Runner, lengths: list[int]):
    both(runner, eager, [lengths])


def test_any_number_of_pages(runner: Runner, eager: Runner):
    """One sequence grows from the first page to the last, by chunks and single tokens."""
    both(runner, eager, [[n] for n in (1, 14, 1, 1, 200, 1, 383, 1, 384, 384, 1, 227, 1)])


def test_random_steps(runner: Runner, eager: Runner):
    rng = random.Random(1)
    choices = [0, 0, 1, 1, 1, 2, 5, 16, 31]
    steps = [[rng.choice(choices) for _ in range(8)] for _ in range(25)]
    both(runner, eager, [step for step in steps if any(step)])


def test_weights_that_are_no_longer_the_models_are_refused(runner: Runner, model: th.HybridModel):
    """As after ``load_state_dict(..., assign=True)``, and after ``bfloat16()``."""
    embedding = model.hf_model.get_input_embeddings()
    weight, data = embedding.weight, embedding.weight.data
    seqs = runner.new_sequences(1)
    free = runner.free_slots, runner.free_pages

    def check_refusal() -> None:
        for call in (lambda: runner.new_sequences(1), lambda: runner.extend(seqs, [[1, 2, 3]])):
            with pytest.raises(ValueError, match="was converted, or given other weights, since"):
                call()
        assert (runner.free_slots, runner.free_pages) == free

    embedding.weight = torch.nn.Parameter(data, requires_grad=False)
    check_refusal()
    embedding.weight, weight.data = weight, data.bfloat16()
    check_refusal()
    weight.data = data
    runner.extend(seqs, [[1, 2, 3]])
    runner.free(seqs)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@contextmanager
def one_core(_count: int) -> Iterator[None]:
    """As taskset does it to a process that runs: to each of its threads."""
    tasks, cores = [*map(int, os.listdir("/proc/self/task"))], os.sched_getaffinity(0)
    for task in tasks:
        os.sched_setaffinity(task, {min(cores)})
    yield
    for task in tasks:
        os.sched_setaffinity(task, cores)


@pytest.mark.parametrize(
    ("change", "count"), [(threads, 1), (threads, 5), (one_core, 1)], ids=["1", "5", "one core"]
)
def test_threads_and_cores_that_change_after_compiling(
    runner: Runner, eager: Runner, change: Callable[[int], Any], count: int
):
    if change is one_core and sys.platform != "linux":
        pytest.skip("cores are given to threads on Linux")
    with change(count):
        both(runner, eager, [[70, 1, 33], [1, 1, 1], [1, 0, 0]])


def test_a_large_step_then_a_small_one(runner: Runner, eager: Runner):
    """The static buffers keep nothing: the same small step gives the same bits before and after."""
    rng = random.Random(2)
    small = [make_tokens(rng, 3), make_tokens(rng, 2)]

    def run_small() -> Tensor:
        seqs = runner.new_sequences(2)
        out = torch.cat([runner.extend(seqs, small), runner.extend(seqs, [[1], [2]])])
        runner.free(seqs)
        return out

    before = run_small()
    both(runner, eager, [[32] * 12, [1] * 12])
    assert torch.equal(run_small(), before)


def test_logits_of_earlier_steps_are_not_overwritten(runner: Runner):
    seqs = runner.new_sequences(2)
    first = runner.extend(seqs, [[1, 2], [3]])
    kept = first.clone()
    second = runner.extend(seqs, [[4], [5]])
    kept_second = second.clone()
    runner.extend(seqs, [[6, 7], [8, 9]])
    runner.extend(seqs, [[6], [8]])
    assert torch.equal(first, kept)
    assert torch.equal(second, kept_second)
    runner.free(seqs)


def test_null_slot_and_page_stay_untouched(runner: Runner, eager: Runner):
    both(runner, eager, [[32] * 12, [1] * 7 + [0] * 5])
    for state in runner.cache.pools["gated_delta_rule"]:
        assert not state["state"][0].any()
        assert not state["conv"][0].any()
    for full in runner.cache.pools["paged_attention"]:
        assert not full["kv"][:, 0].any()


def test_report(runner: Runner):
    report = runner.report()
    assert (report.recompiles, report.graph_breaks, report.pool_clones) == (0, 0, ())
    assert report.captured_graphs == ()
    assert set(report.graphs) == {"decode", "extend"}
    assert report.compiles == len(report.graphs)
    parts = {"causal_conv1d": 1, "gated_delta_rule": 1}
    step = parts if compiler_missing() else {"gated_delta_step": 1}
    for variant, ops in report.ops.items():
        calls: dict[str, int] = {}
        for op, count in ops.items():
            name, _, impl = op.partition("[")
            assert impl.removesuffix("]").removeprefix("chunk_") in ("cpp", "torch"), op
            calls[name] = calls.get(name, 0) + count
        mixer = step if variant.startswith("decode") else parts
        assert calls.pop("linear", 0) in (0, 9), variant
        assert calls == {**mixer, "paged_attention": 1}, variant


def test_logits_of_all_tokens_share_the_graph_of_the_last(runner: Runner, eager: Runner):
    rng = random.Random(3)
    before = runner.report().compiles
    ours, theirs = runner.new_sequences(3), eager.new_sequences(3)
    for lengths in ([20, 1, 5], [1, 1, 1], [4, 2, 2], [1, 1, 1]):
        tokens = [make_tokens(rng, n) for n in lengths]
        for kind, num_rows in (("all", sum(lengths)), ("last", 3)):
            expected = eager.extend(theirs, tokens, logits=kind)
            assert expected.shape[0] == num_rows
            assert_same(runner.extend(ours, tokens, logits=kind), expected)
    runner.free(ours)
    assert runner.report().compiles == before


def test_a_launched_step_runs_the_graph_of_extend(runner: Runner, eager: Runner):
    """What is done around it is no part of the graph: nothing is compiled for it."""
    rng = random.Random(4)
    before = runner.report()
    draws = [Draw(th.Sampling()), Draw(th.Sampling(temperature=0.8, top_p=0.9), 0.6)]
    prompts = [make_tokens(rng, 20), make_tokens(rng, 3)]
    taken = []
    for each in (runner, eager):
        seqs = each.new_sequences(2)
        steps = [each.launch(seqs, tokens, draws) for tokens in (prompts, *[[None, None]] * 5)]
        taken.append([step.result() for step in steps])
        each.free(seqs)
    assert taken[0] == taken[1]
    after = runner.report()
    assert (after.compiles, after.recompiles) == (before.compiles, 0)


def test_a_second_runner_has_graphs_of_its_own(warm: Runner):
    """Other weights in the same code: neither runner may be served the other's graph.

    What Inductor made of the first one's decode step is found in its cache.
    """
    model = make_hybrid(seed=1)
    second = Runner(model, **SIZES, prefill=False)
    expected = Runner(model, **SIZES, compile=False)
    before = warm.report().compiles
    [ours], [theirs], [first] = (r.new_sequences(1) for r in (second, expected, warm))
    for tokens in ([5], [8], [9]):
        logits = second.extend([ours], [tokens])
        assert_same(logits, expected.extend([theirs], [tokens]))
        assert (logits - warm.extend([first], [tokens])).abs().max() > 0.1
    warm.free([first])
    assert warm.report().compiles == before
    assert (second.report().compiles, second.report().recompiles) == (1, 0)


def test_copied_layers_give_the_bits_of_traced_ones(monkeypatch: pytest.MonkeyPatch):
    """The report says what was copied, and every region is compiled once."""
    kinds = ["full_attention", *["linear_attention"] * 3]
    model = make_hybrid(layer_types=kinds, num_hidden_layers=4)
    logits, reports = [], []
    for _ in range(2):
        runner = Runner(model, max_seqs=3, max_tokens=64, kv_tokens=64, prefill=False)
        seqs = runner.new_sequences(3)
        logits += [[runner.extend(seqs[:n], [[5 * n]] * n) for n in (3, 1, 2, 3)]]
        reports.append(runner.report())
        monkeypatch.setattr(LayersOnce, "trace", lambda layers, step: step())  # whole, next time
    copied, traced = (report.graphs["decode"].layers for report in reports)
    assert copied == LayerCount(traced=3, copied=1)
    assert (traced.traced, traced.copied) == (4, 0)
    for report in reports:
        assert (report.recompiles, report.graph_breaks, report.pool_clones) == (0, 0, ())
        assert report.graphs["decode"].regions == (1, 3, 1)
        assert report.ops["decode"] == reports[0].ops["decode"]
    assert all(map(torch.equal, *logits))
    shown = explain.graphs(reports[0]).rows[0][2]
    assert shown.endswith(" nodes\n3 layers\n1 copied\n3 regions\n5 calls")


def test_warm_up_again_compiles_nothing(runner: Runner):
    before = runner.report().compiles
    names: list[str] = []
    runner.warm_up(names.append)
    assert runner.report().compiles == before


def test_a_compile_that_fails_breaks_no_sequence(model: th.HybridModel, eager: Runner):
    """The pass fails once; the same step then compiles and runs."""
    failures = ["once"]

    def fail_once(graph: torch.fx.Graph) -> None:
        if failures:
            raise RuntimeError(failures.pop())

    torch._dynamo.reset()
    runner = Runner(model, **SIZES, passes=(Pass("fail_once", fail_once),))
    [seq], [twin] = runner.new_sequences(1), eager.new_sequences(1)
    with run_as_traced():  # Inductor comes after the passes
        with pytest.raises(Exception, match="pass fail_once failed: once"):
            runner.extend([seq], [[1, 2, 3]])
        assert runner.length(seq) == 0
        assert_same(runner.extend([seq], [[1, 2, 3]]), eager.extend([twin], [[1, 2, 3]]))
