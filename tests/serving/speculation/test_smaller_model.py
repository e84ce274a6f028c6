"""Drafts of a smaller model: its own greedy tokens, and nothing that a lack of room could break."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest

import torch_hybrid as th
from tests.errors import error_text
from tests.tiny_models import VOCAB_SIZE, make_hybrid

SIZES: dict[str, Any] = {"max_tokens": 48, "kv_tokens": 512, "page_size": 8, "compile": False}
DRAFTS = 3
# A hybrid, and a model that keeps nothing but keys.
FAMILIES = {"qwen3_next_dense": {"max_snapshots": 3}, "qwen3": {}}


def greedy(model: th.HybridModel, history: list[int], count: int) -> list[int]:
    engine = th.Engine(th.Runner(model, max_seqs=1, **SIZES), eos_token_ids=[])
    [output] = engine.generate(history, th.Sampling(max_new_tokens=count))
    return output.tokens


def requests(rng: random.Random, *new: int) -> tuple[list[list[int]], list[th.Sampling]]:
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (5, 60, 1, 17)]
    samplings = [
        th.Sampling(max_new_tokens=n, temperature=(i % 2) * 0.8, seed=i) for i, n in enumerate(new)
    ]
    return prompts, samplings


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_its_greedy_tokens(family: str):
    """In chunks longer than a step, and whatever it drafted before."""
    smaller = make_hybrid(family, seed=1)
    runner = th.Runner(smaller, max_seqs=6, **SIZES, **FAMILIES[family])
    target = th.Runner(make_hybrid(), max_seqs=3, **SIZES, max_drafts=DRAFTS)
    speculate = th.Speculation(runner, num_drafts=DRAFTS, adapts=False)
    engine = th.Engine(target, speculate=speculate)
    drafter = engine._speculator._drafter
    propose, compared = drafter.propose, []

    def checked(asked: Any, counts: Any) -> list[list[int]]:
        drafts = propose(asked, counts)
        for request, own, count in zip(asked, drafts, counts, strict=True):
            assert own == (greedy(smaller, request.history, count) if own else [])
            compared.append(len(own))
        return drafts

    drafter.propose = checked
    prompts, samplings = requests(random.Random(0), 7, 8, 9, 10)
    outputs = {o.index: o.tokens for o in engine.generate(prompts, samplings)}
    plain = th.Engine(th.Runner(make_hybrid(), max_seqs=3, **SIZES))
    assert outputs == {o.index: o.tokens for o in plain.generate(prompts, samplings)}
    assert sum(map(bool, compared)) > 15
    assert (runner.free_slots, runner.free_pages) == (6, 64)  # requests have ended: so has it


def test_a_model_that_drafts_for_itself_is_always_right():
    model = make_hybrid()
    runner = th.Runner(model, max_seqs=2, **SIZES, max_snapshots=1)
    target = th.Runner(model, max_seqs=1, **SIZES, max_drafts=DRAFTS)
    engine = th.Engine(target, speculate=th.Speculation(runner, num_drafts=DRAFTS, adapts=False))
    [output] = engine.generate([1, 2, 3], th.Sampling(max_new_tokens=21))
    assert output.tokens == greedy(model, [1, 2, 3], 21)
    assert engine.stats().drafts.acceptance == 1.0
    assert engine.stats().drafts.steps <= 6


def test_a_drafter_without_room_drafts_for_fewer():
    """Slots, snapshots and pages: who gets none is served all the same."""
    prompts, samplings = requests(random.Random(0), 7, 8, 9, 10)
    plain = th.Engine(th.Runner(make_hybrid(), max_seqs=4, **SIZES))
    expected = {o.index: o.tokens for o in plain.generate(prompts, samplings)}
    for sizes in ({"max_seqs": 3}, {"max_snapshots": 1}, {"kv_tokens": 40}):
        options = {**SIZES, "max_seqs": 8, "max_snapshots": 4, **sizes}
        runner = th.Runner(make_hybrid(seed=1), **options)
        target = th.Runner(make_hybrid(), max_seqs=4, **SIZES, max_drafts=DRAFTS)
        speculate = th.Speculation(runner, num_drafts=DRAFTS, adapts=False)
        engine = th.Engine(target, speculate=speculate)
        assert {o.index: o.tokens for o in engine.generate(prompts, samplings)} == expected
        assert engine.stats().drafts.drafted > 0
        assert runner.free_slots == options["max_seqs"]


def test_a_step_that_was_cut_off_is_drafted_for_again(monkeypatch: pytest.MonkeyPatch):
    """From a kept prefix, so that the history is the one that was drafted for before."""
    runner = th.Runner(make_hybrid(seed=1), max_seqs=4, **SIZES, max_snapshots=3)
    target = th.Runner(make_hybrid(), max_seqs=2, **SIZES, max_drafts=DRAFTS, max_snapshots=4)
    speculate = th.Speculation(runner, num_drafts=DRAFTS, adapts=False)
    engine = th.Engine(target, prefix_cache=th.PrefixCache(min_tokens=4), speculate=speculate)
    prompts, _ = requests(random.Random(0))
    sampling = th.Sampling(max_new_tokens=6, ignore_eos=True, n=2)
    expected = [o.tokens for o in th.Engine(target).generate(prompts[3], sampling)]
    assert [o.tokens for o in engine.generate(prompts[3], sampling)] == expected
    request = engine.submit(prompts[3], th.Sampling(max_new_tokens=6, ignore_eos=True))
    with monkeypatch.context() as patch:
        patch.setattr(th.Runner, "verify", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    while engine.has_unfinished:
        engine.step()
    assert request.output.tokens == expected[0]
    engine.submit(prompts[0], sampling, on_event=lambda event: event.output and _interrupted())
    while engine.has_unfinished:
        with suppress(KeyboardInterrupt):
            engine.step()
    assert runner.free_slots == 4  # of requests that ended in steps that were cut off, too


def _interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_what_is_refused():
    target = th.Runner(make_hybrid(), max_seqs=2, **SIZES, max_drafts=DRAFTS)

    def refusal(drafter: th.Runner) -> str:
        return error_text(
            ValueError, th.Engine, target, speculate=th.Speculation(drafter, num_drafts=DRAFTS)
        )

    other = make_hybrid(vocab_size=77)
    small = {**SIZES, "max_snapshots": 1}
    assert "of 199 tokens, got 77" in refusal(th.Runner(other, max_seqs=2, **small))
    assert "got 1 and 1" in refusal(th.Runner(make_hybrid(), max_seqs=1, **small))
    assert "got 2 and 0" in refusal(th.Runner(make_hybrid(), max_seqs=2, **SIZES))
    assert "prefill=False" in refusal(th.Runner(make_hybrid(), max_seqs=2, **small, prefill=False))
    assert refusal(target) == "a runner cannot draft for itself"
