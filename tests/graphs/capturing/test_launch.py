"""Launched steps: the tokens of ``extend`` and a draw on the host, without the host in between."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import torch_hybrid as th
from tests.devices import needs_cuda
from tests.tiny_models import VOCAB_SIZE, make_model
from torch_hybrid.graphs.capturing.launch import Launched
from torch_hybrid.graphs.runner import Runner
from torch_hybrid.sampling import NOT_FINITE, Draw, Sampling, sample

SMALL: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "bailing_hybrid": {},
    "qwen3_5": {},
}
SIZES: dict[str, Any] = {"max_seqs": 6, "max_tokens": 128, "kv_tokens": 512, "compile": False}
GREEDY = Sampling()
SAMPLINGS = [
    GREEDY,
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.5, top_p=0.8),
    Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.05),
]


def make_runner(family: str, device: str = "cpu", **options: Any) -> Runner:
    model = th.adapt(make_model(family, **SMALL[family]).to(device))
    return Runner(model, **{**SIZES, **options})


def make_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


class Served:
    """Sequences that arrive one after the other; each decodes once its prompt has run.

    A row of ``plan`` is one step: for each of its sequences, how many new tokens it has, 0 for one
    that was sampled; and whether a token is drawn.
    """

    plan = (
        {0: (40, False)},
        {0: (30, True)},
        {0: (0, True), 1: (3, True)},
        {0: (0, True), 1: (0, True), 2: (20, False)},
        {1: (0, True), 2: (5, True)},
        {0: (0, True), 1: (0, True), 2: (0, True)},
        {0: (0, True), 1: (0, True), 2: (0, True), 3: (1, True), 4: (1, True)},
        {3: (0, True), 0: (0, True), 4: (0, True), 1: (0, True), 2: (0, True)},
        {2: (0, True)},
        {4: (0, True), 2: (0, True), 1: (7, True)},
        {1: (0, True), 2: (0, True)},
    )

    def __init__(self, runner: Runner, samplings: list[Sampling]) -> None:
        self.runner, self.samplings = runner, samplings

    def draws(self, row: dict[int, tuple[int, bool]]) -> list[Draw | None]:
        return [
            Draw(self.samplings[i], self.rng.random()) if is_drawn else None
            for i, (_, is_drawn) in row.items()
        ]

    def by_hand(self) -> list[list[int]]:
        """Tokens of each step by ``extend`` and the draw on the host."""
        self.rng = random.Random(3)
        seqs = self.runner.new_sequences(5)
        last: dict[int, int] = {}
        taken = []
        for row in self.plan:
            new = [make_tokens(self.rng, n) if n else [last[i]] for i, (n, _) in row.items()]
            logits = self.runner.extend([seqs[i] for i in row], new)
            draws = self.draws(row)
            places = [place for place, draw in enumerate(draws) if draw is not None]
            drawn = sample(logits[places], [draw for draw in draws if draw is not None])
            last |= {list(row)[place]: token for place, token in zip(places, drawn, strict=True)}
            taken.append(drawn)
        self.runner.free(seqs)
        return taken

    def launched(self) -> list[list[int]]:
        """The same, all steps launched before the first result is read."""
        self.rng = random.Random(3)
        seqs = self.runner.new_sequences(5)
        under_way: list[tuple[Launched, list[Draw | None]]] = []
        for row in self.plan:
            new = [make_tokens(self.rng, n) if n else None for n, _ in row.values()]
            draws = self.draws(row)
            under_way.append((self.runner.launch([seqs[i] for i in row], new, draws), draws))
        self.runner.free(seqs)
        return [
            [token for token, draw in zip(step.result(), draws, strict=True) if draw is not None]
            for step, draws in under_way
        ]


OPTIONS = [{}, {"cuda_graphs": "on"}, {"two_batch_overlap": "on"}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "captured", "halves"])
@pytest.mark.parametrize("family", SMALL)
def test_tokens_are_those_of_extend(family: str, options: dict[str, Any]):
    """Buckets that come for the first time in between: to capture them changes no last token."""
    served = Served(make_runner(family, **options), SAMPLINGS)
    assert served.launched() == served.by_hand()
    assert served.launched() == served.by_hand()


def test_steps_of_all_draws_share_a_captured_graph():
    runner = make_runner("qwen3_next", cuda_graphs="on")
    seqs = runner.new_sequences(2)
    for sampling in (GREEDY, *SAMPLINGS[1:4]):
        runner.launch(seqs, [[1], [2]], [Draw(sampling, 0.5)] * 2)
    runner.extend(seqs, [[1], [2]])
    assert runner.report().captured_graphs == ("decode: 2 sequences of 32 pages",)
    runner.free(seqs)


def test_logits_that_are_not_finite_are_told_and_harm_nobody_else():
    runner = make_runner("qwen3_next")
    with torch.no_grad():
        runner.model.hf_model.model.embed_tokens.weight[7] = float("nan")
    seqs = runner.new_sequences(2)
    runner.launch(seqs, [[1, 2], [3, 7]], [None, None])
    draws = [Draw(GREEDY), Draw(SAMPLINGS[3], 0.4)]
    steps = [runner.launch(seqs, [[4], [5]], draws)]
    steps += [runner.launch(seqs, [None, None], draws) for _ in range(3)]
    good, bad = zip(*(step.result() for step in steps), strict=True)
    assert bad == (NOT_FINITE,) * 4
    [alone] = runner.new_sequences(1)
    runner.launch([alone], [[1, 2]], [None])
    first = runner.launch([alone], [[4]], draws[:1])
    rest = [runner.launch([alone], [None], draws[:1]) for _ in range(3)]
    assert good == tuple(step.result()[0] for step in (first, *rest))


def test_null_slot_and_page_stay_untouched():
    runner = make_runner("qwen3_next", cuda_graphs="on")
    Served(runner, SAMPLINGS).launched()
    for state in runner.cache.pools["gated_delta_rule"]:
        assert not state["state"][0].any()
        assert not state["conv"][0].any()
    for full in runner.cache.pools["paged_attention"]:
        assert not full["kv"][:, 0].any()


def test_a_token_that_was_not_sampled_by_the_step_before_is_refused():
    runner = make_runner("qwen3_next")
    [first, second] = seqs = runner.new_sequences(2)
    draw = Draw(GREEDY)
    refused = "has no sampled token: its last step drew none"
    with pytest.raises(ValueError, match=refused):
        runner.launch([first], [None], [draw])
    runner.launch(seqs, [[1], [2]], [draw, None])
    with pytest.raises(ValueError, match=refused):
        runner.launch(seqs, [None, None], [draw, draw])
    runner.extend([first], [[3]])
    with pytest.raises(ValueError, match=refused):
        runner.launch([first], [None], [draw])
    assert runner.length(first) == 2
    runner.launch([second], [[4]], [draw])
    runner.free(seqs)
    [third, _] = runner.new_sequences(2)
    with pytest.raises(ValueError, match=refused):
        runner.launch([third], [None], [draw])


def test_refuses_what_extend_refuses():
    runner = make_runner("qwen3_next")
    [seq] = runner.new_sequences(1)
    draw = Draw(GREEDY)
    with pytest.raises(ValueError, match="got 1 sequences, 1 tokens and 2 draws"):
        runner.launch([seq], [[1]], [draw, draw])
    with pytest.raises(ValueError, match="at least one sequence, got 0 sequences"):
        runner.launch([], [], [])
    with pytest.raises(ValueError, match="token ids must be within 0 and"):
        runner.launch([seq], [[-1]], [draw])
    with pytest.raises(TypeError, match="a token must be an int"):
        runner.launch([seq], [[1.5]], [draw])
    for _ in range(4):
        runner.launch([seq], [[1] * 128], [draw])
    with pytest.raises(th.CapacityError, match="KV page"):
        runner.launch([seq], [None], [draw])
    runner.free([seq])
    with pytest.raises(ValueError, match="was freed"):
        runner.launch([seq], [[1]], [draw])
    assert (runner.free_slots, runner.free_pages) == (6, 32)


@needs_cuda
@pytest.mark.parametrize("family", SMALL)
def test_on_a_gpu(family: str):
    runner = make_runner(family, "cuda", compile=True)
    served = Served(runner, SAMPLINGS)
    expected = served.by_hand()
    assert served.launched() == expected
    assert served.launched() == expected
    report = runner.report()
    assert (report.recompiles, report.graph_breaks, report.pool_clones) == (0, 0, ())


@needs_cuda
def test_an_engine_that_runs_ahead_on_a_gpu():
    runner = make_runner("qwen3_next", "cuda", compile=True)
    rng = random.Random(5)
    prompts = [make_tokens(rng, n) for n in (3, 50, 1, 70, 12, 9, 4, 30)]
    samplings = [
        Sampling(max_new_tokens=rng.randint(1, 30), temperature=rng.choice([0.0, 0.8]), seed=i)
        for i in range(len(prompts))
    ]
    tokens = {}
    for run_ahead in ("off", "on"):
        engine = th.Engine(runner, eos_token_ids=[1, 2, 3], run_ahead=run_ahead)
        outputs = engine.generate(prompts, samplings)
        tokens[run_ahead] = {output.index: output.tokens for output in outputs}
        assert (runner.free_slots, runner.free_pages) == (6, 32)
    assert tokens["on"] == tokens["off"]
