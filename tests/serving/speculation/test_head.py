"""Drafts of a model's own head: those of the head in plain PyTorch, whatever was run before."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import torch_hybrid as th
from tests.graphs.as_traced import run_as_traced
from tests.graphs.test_verify import Twins
from tests.graphs.test_verify import go_through as go_through_twins
from tests.models.mtp_checkpoint import LAYOUTS, Oracle, make_checkpoint
from tests.tiny_models import VOCAB_SIZE, make_hybrid
from torch_hybrid.graphs.options import assembly

SIZES: dict[str, Any] = {"max_seqs": 4, "max_tokens": 48, "kv_tokens": 512, "page_size": 8}
DRAFTS = 3
DENSE = "qwen3_next_dense"


def loaded(family: str, folder: Path, **options: Any) -> tuple[Oracle, th.Runner]:
    oracle = make_checkpoint(family, folder)
    model = th.from_pretrained(folder, mtp=True)
    sizes = {**SIZES, "compile": False, "max_drafts": DRAFTS, **options}
    return oracle, th.Runner(model, **sizes)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, th.HybridModel]:
    folder = tmp_path_factory.mktemp("dense")
    return make_checkpoint(DENSE, folder), th.from_pretrained(folder, mtp=True)


def some_tokens(rng: random.Random, *lengths: int) -> list[list[int]]:
    return [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in lengths]


class Histories:
    """Sequences with the tokens that they hold, whose drafts are compared."""

    def __init__(self, oracle: Oracle, runner: th.Runner) -> None:
        self.oracle, self.runner, self.rng = oracle, runner, random.Random(0)
        self.seqs: list[th.Sequence] = []
        self.held: list[list[int]] = []

    def begin(self, *lengths: int) -> None:
        prompts = some_tokens(self.rng, *lengths)
        self.seqs = self.runner.new_sequences(len(prompts))
        self.held = [[] for _ in prompts]
        self.extend(prompts)

    def extend(self, tokens: Sequence[Sequence[int]]) -> None:
        self.runner.extend(self.seqs, tokens)
        for held, new in zip(self.held, tokens, strict=True):
            held += new

    def verify(self, num_drafts: Sequence[int], counts: Sequence[int]) -> None:
        new = some_tokens(self.rng, *(1 + n for n in num_drafts))
        self.runner.verify(self.seqs, new)
        self.runner.accept(self.seqs, counts)
        for held, tokens, count in zip(self.held, new, counts, strict=True):
            held += tokens[: 1 + count]

    def check(self, *counts: int, copied_pages: int = 0) -> None:
        next_tokens = [tokens[0] for tokens in some_tokens(self.rng, *[1] * len(self.seqs))]
        lengths = [self.runner.length(seq) for seq in self.seqs]
        free_pages = self.runner.free_pages
        drafts = self.runner.draft(self.seqs, next_tokens, counts)
        assert drafts == [
            self.oracle.drafts([*held, token], count)
            for held, token, count in zip(self.held, next_tokens, counts, strict=True)
        ]
        assert [self.runner.length(seq) for seq in self.seqs] == lengths
        assert self.runner.free_pages == free_pages - copied_pages


@pytest.mark.parametrize("family", LAYOUTS)
def test_drafts_are_those_of_the_head(family: str, tmp_path: Path):
    """After prompts, in chunks too, decoding, and drafts of which some were accepted."""
    go_through(Histories(*loaded(family, tmp_path)))


def test_where_all_steps_are_of_one_graph(
    dense: tuple[Oracle, th.HybridModel], monkeypatch: pytest.MonkeyPatch
):
    """As in a batch-invariant runner on a GPU: there the head reads the tokens of every step."""
    monkeypatch.setattr(assembly, "runs_one_mode", lambda device: True)
    oracle, model = dense
    sizes = {**SIZES, "compile": False, "max_drafts": DRAFTS, "batch_invariant": True}
    go_through(Histories(oracle, th.Runner(model, **sizes)))


def test_prompts_of_one_token(dense: tuple[Oracle, th.HybridModel]):
    """Nothing stands before the first token that the head reads."""
    oracle, model = dense
    runner = th.Runner(model, **SIZES, compile=False, max_drafts=DRAFTS)
    for _ in range(2):  # the second time on what the first ones left
        histories = Histories(oracle, runner)
        histories.begin(1, 1, 1, 1)
        histories.check(3, 3, 3, 3)
        runner.free(histories.seqs)


def go_through(histories: Histories) -> None:
    """Prompts, steps of one token and of drafts in turn."""
    histories.begin(9, 1, 30)
    histories.check(3, 1, 2)
    histories.extend(some_tokens(histories.rng, 1, 1, 1))
    histories.verify([3, 0, 2], [2, 0, 0])
    histories.check(3, 3, 3)
    histories.check(1, 2, 3)
    histories.verify([3, 3, 1], [3, 1, 1])
    histories.extend(some_tokens(histories.rng, 4, 1, 20))
    histories.check(3, 3, 1)
    histories.verify([1, 2, 3], [0, 2, 1])
    histories.extend(some_tokens(histories.rng, 1, 1, 1))
    histories.check(2, 2, 2)


def test_tokens_that_come_one_by_one_are_read_together(
    dense: tuple[Oracle, th.HybridModel], monkeypatch: pytest.MonkeyPatch
):
    """The head runs when there is something to draft, or no room to keep more; a step of it is no
    larger than the runner's."""
    oracle, model = dense
    runner = th.Runner(model, **SIZES, compile=False, max_drafts=DRAFTS)
    histories, calls = Histories(oracle, runner), []
    drafting = runner._drafting
    run = drafting._run_head
    monkeypatch.setattr(drafting, "_run_head", lambda *a: calls.append(len(a[0])) or run(*a))
    histories.begin(9, 1, 30)
    for _ in range(2 * SIZES["max_tokens"] + 3):
        histories.extend(some_tokens(histories.rng, 1, 1, 1))
    assert calls == 2 * [1, 1, 1]
    histories.check(3, 2, 3)
    assert calls == 2 * [1, 1, 1] + [3]
    for _ in range(20):
        histories.extend(some_tokens(histories.rng, 1, 1, 1))
    histories.check(3, 2, 3)
    assert calls == 2 * [1, 1, 1] + [3, 2, 1, 3]


def test_forks_and_snapshots(dense: tuple[Oracle, th.HybridModel]):
    """A fork goes on from the hidden state of its snapshot, after drafts were accepted too."""
    oracle, model = dense
    runner = th.Runner(model, **SIZES, compile=False, max_drafts=DRAFTS, max_snapshots=2)
    histories = Histories(oracle, runner)
    histories.begin(11)
    histories.extend(some_tokens(histories.rng, 1))
    histories.verify([3], [2])
    snapshot = runner.snapshot(histories.seqs[0])
    histories.seqs += runner.new_sequences(2, start=snapshot)
    histories.held += [list(histories.held[0]) for _ in range(2)]
    histories.check(3, 3, 3, copied_pages=2)
    histories.extend(some_tokens(histories.rng, 1, 5, 1))
    runner.release(snapshot)
    histories.check(3, 2, 3)


def test_a_snapshot_before_drafts_are_accepted(dense: tuple[Oracle, th.HybridModel]):
    """The head reads what is certain for it, and what is accepted later all the same."""
    oracle, model = dense
    runner = th.Runner(model, **SIZES, compile=False, max_drafts=DRAFTS, max_snapshots=2)
    histories = Histories(oracle, runner)
    histories.begin(1)
    for _ in range(8):
        new = some_tokens(histories.rng, 4)[0]
        runner.verify(histories.seqs, [new])
        snapshot = runner.snapshot(histories.seqs[0])
        runner.draft(histories.seqs, new[1:2], [3])
        runner.accept(histories.seqs, [3])
        histories.held[0] += new
        histories.verify([1], [0])  # which leaves the snapshot's slot
        histories.check(3)
        histories.seqs += runner.new_sequences(1, start=snapshot)
        runner.release(snapshot)
        histories.held.append(histories.held[0][:-4])
        histories.check(3, 3, copied_pages=len(histories.held[1]) % 8 > 0)
        runner.free([histories.seqs.pop()])
        histories.held.pop()


def test_two_batch_overlap(dense: tuple[Oracle, th.HybridModel]):
    """The second half of a sequence that is cut reads the hidden state of the first."""
    oracle, model = dense
    options = {"two_batch_overlap": "on", "cuda_graphs": "on", "max_tokens": 128}
    sizes = {**SIZES, **options, "compile": False, "max_drafts": DRAFTS}
    histories = Histories(oracle, th.Runner(model, **sizes))
    histories.begin(100)
    histories.check(3)
    histories.extend(some_tokens(histories.rng, 1))
    histories.check(3)


def test_steps_as_traced(dense: tuple[Oracle, th.HybridModel]):
    """One more graph, of the head alone; steps of one token keep their rows and run none of it.

    Steps of such a model without its head are in Inductor's code in ``graphs/test_verify.py``.
    """
    oracle, model = dense
    twins = Twins(model, compile=True)
    runner = twins.runner
    with run_as_traced():
        go_through_twins(twins)  # logits are those of eager steps that were given what was accepted
        runner.free(twins.seqs)
        histories = Histories(oracle, runner)
        histories.begin(9, 1, 30)
        histories.check(3, 1, 2)
        histories.extend(some_tokens(histories.rng, 1, 1, 1))
        histories.verify([3, 0, 2], [2, 0, 0])
        histories.check(3, 3, 3)
        histories.check(1, 1, 1)
    report = runner.report()
    assert {"decode", "extend", "verify", "draft of 1", "draft of 3"} == set(report.graphs)
    assert (report.recompiles, report.graph_breaks) == (0, 0)
    calls = {name: _count(graph.ops, "previous_rows") for name, graph in report.graphs.items()}
    assert calls == dict.fromkeys(("decode", "extend", "verify"), 1) | dict.fromkeys(
        ("draft of 1", "draft of 3"), 0
    )
    assert _count(report.graphs["verify"].ops, "gated_delta_step") == 1
    linears = {name: _count(graph.ops, "linear") for name, graph in report.graphs.items()}
    assert linears["decode"] == linears["verify"] < linears["extend"]
    assert linears["draft of 3"] == 3 * linears["draft of 1"] >= 3 * 5


def _count(ops: Mapping[str, int], name: str) -> int:
    return sum(n for op, n in ops.items() if op.startswith(name))


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_an_engine_whatever_happens(
    prefix_cache: bool, dense: tuple[Oracle, th.HybridModel], monkeypatch: pytest.MonkeyPatch
):
    """Prompts in chunks, requests that wait and are preempted, prefixes that are kept: each draft
    is that of the head alone, and the tokens are those without drafts."""
    oracle, model = dense
    rng = random.Random(0)
    start = some_tokens(rng, 20)[0]
    prompts = [start + own for own in some_tokens(rng, 5, 30, 1, 17, 9, 5)]
    samplings = [
        th.Sampling(max_new_tokens=6 + i, temperature=(i % 2) * 0.8, top_k=20, seed=i)
        for i in range(len(prompts))
    ]
    sizes = {**SIZES, "compile": False, "kv_tokens": 480 if prefix_cache else 160, "max_seqs": 3}
    plain = {o.index: o for o in th.Engine(th.Runner(model, **sizes)).generate(prompts, samplings)}
    runner = th.Runner(model, **sizes, max_drafts=DRAFTS, max_snapshots=4)
    speculate = th.Speculation("mtp", num_drafts=DRAFTS, adapts=False)
    options: dict[str, Any] = {"run_ahead": "on"}  # steps with prompts are not waited for
    if prefix_cache:
        options = {"prefix_cache": th.PrefixCache(min_tokens=8)}
    engine = th.Engine(runner, speculate=speculate, **options)
    draft, compared = th.Runner.draft, []

    def checked(
        self: th.Runner, seqs: Any, tokens: Sequence[int], counts: Sequence[int]
    ) -> list[list[int]]:
        drafts = draft(self, seqs, tokens, counts)
        histories = {r.sequence: r.history for r in engine._scheduler.running}
        for seq, own, count in zip(seqs, drafts, counts, strict=True):
            assert own == oracle.drafts(histories[seq], count)
            compared.append(len(own))
        return drafts

    monkeypatch.setattr(th.Runner, "draft", checked)
    outputs = {output.index: output for output in engine.generate(prompts, samplings)}
    assert {i: o.tokens for i, o in outputs.items()} == {i: o.tokens for i, o in plain.items()}
    assert len(compared) > 30
    if prefix_cache:
        longer = [[*o.prompt, *o.tokens, 3] for o in outputs.values()]
        assert len(list(engine.generate(longer, th.Sampling(max_new_tokens=5)))) == len(longer)
        assert engine.stats().prefix_cache.num_hits > 0
    engine.close()
    assert (runner.free_slots, runner.free_pages) == (3, sizes["kv_tokens"] // 8)


def test_what_is_refused(dense: tuple[Oracle, th.HybridModel], tmp_path: Path):
    _, model = dense
    runner = th.Runner(model, **SIZES, compile=False, max_drafts=DRAFTS)
    [seq] = runner.new_sequences(1)
    with pytest.raises(ValueError, match=r"counts must be within 1 and 3, got \[4\]"):
        runner.draft([seq], [1], [4])
    with pytest.raises(ValueError, match="a token and a count for each of at least one sequence"):
        runner.draft([seq], [1], [])
    with pytest.raises(ValueError, match="token"):
        runner.draft([seq], [VOCAB_SIZE], [1])
    with pytest.raises(ValueError, match="max_drafts must be at most 126 for a model with a head"):
        th.Runner(model, **{**SIZES, "max_tokens": 200}, compile=False, max_drafts=127)
    without = th.Runner(model, **SIZES, compile=False)
    with pytest.raises(th.UnsupportedError, match=r"from_pretrained\(path, mtp=True\) on a runner"):
        without.draft(without.new_sequences(1), [1], [1])
    headless = th.Runner(make_hybrid(), **SIZES, compile=False, max_drafts=DRAFTS)
    with pytest.raises(ValueError, match=r"needs a model with its head: from_pretrained\(path, mt"):
        th.Engine(headless, speculate=th.Speculation("mtp", num_drafts=DRAFTS))
    pages = th.Runner(model, **{**SIZES, "kv_tokens": 8}, compile=False, max_drafts=DRAFTS)
    [seq] = pages.new_sequences(1)
    pages.extend([seq], [[1] * 7])
    with pytest.raises(th.CapacityError):
        pages.draft([seq], [1], [3])
    assert len(pages.draft([seq], [1], [1])[0]) == 1
