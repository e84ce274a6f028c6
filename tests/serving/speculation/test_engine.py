"""An engine that speculates over a fake runner: the tokens, texts and ends of one that does not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from tests.serving.fake_runner import FakeRunner, alone, digest_of
from tests.serving.speculation.drafters import Knowing
from torch_hybrid.sampling import Sampling
from torch_hybrid.serving.engine import Engine
from torch_hybrid.serving.request import Output, Request
from torch_hybrid.serving.speculation import Ngram, Speculation
from torch_hybrid.serving.speculation.pace import Pace

PROMPTS = [[1, 2, 3], [7], list(range(40)), [4, 4], [9] * 11]
SAMPLINGS = {
    "greedy": Sampling(max_new_tokens=24),
    "drawn": Sampling(max_new_tokens=24, temperature=1.0, seed=5),
    "filtered": Sampling(
        max_new_tokens=24, temperature=0.8, top_k=9, top_p=0.8, min_p=0.02, seed=5
    ),
    "ruled": Sampling(
        max_new_tokens=24,
        min_new_tokens=6,
        temperature=0.9,
        seed=5,
        repetition_penalty=1.3,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias={3: 1.0, 4: -math.inf},
    ),
}


def served(sampling: Sampling | Sequence[Sampling], *, engine: Engine) -> list[Output]:
    outputs = sorted(engine.generate(PROMPTS, sampling), key=lambda output: output.index)
    assert engine.runner.live == []
    return outputs


def knowing(sampling: Sampling, share: float = 0.7, **runner: int) -> Engine:
    """An engine whose drafts are known from the same requests served without."""
    plain = {o.index: o.tokens for o in served(sampling, engine=Engine(FakeRunner()))}
    drafter = Knowing(lambda request: plain[request.index], share=share)
    speculate = Speculation(drafter, num_drafts=4, adapts=False)
    return Engine(FakeRunner(max_drafts=4, **runner), speculate=speculate)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_tokens_are_those_without(name: str, share: float):
    """Whatever is drafted: greedy, drawn, filtered, and by rules that look at the history."""
    sampling = SAMPLINGS[name]
    plain = served(sampling, engine=Engine(FakeRunner()))
    engine = knowing(sampling, share)
    assert served(sampling, engine=engine) == plain
    assert engine.stats().drafts.drafted > 50
    assert share == 0.7 or engine.stats().drafts.acceptance == share
    if share == 1.0:
        assert engine.runner.num_extends < 24 * len(PROMPTS) / 2


def test_fewer_pages_than_drafts_want():
    """Drafts never preempt anybody, and their pages come back."""
    sampling = Sampling(max_new_tokens=24)
    plain = served(sampling, engine=Engine(FakeRunner(num_pages=16)))
    engine = knowing(sampling, num_pages=16, max_seqs=3)
    assert served(sampling, engine=engine) == plain
    assert engine.stats().drafts.accepted > 0


def test_a_budget_that_drafts_would_break():
    sampling = Sampling(max_new_tokens=24)
    engine = knowing(sampling, max_tokens=6)
    assert served(sampling, engine=engine) == served(sampling, engine=Engine(FakeRunner()))
    assert engine.stats().drafts.accepted > 0


def test_an_end_inside_of_drafts():
    """A stop token, or the last token, ends a request; what was drafted after it is not seen."""
    tokens = alone([5, 6], Sampling(max_new_tokens=12))
    drafter = Knowing(lambda _: tokens, share=1.0)
    engine = Engine(
        FakeRunner(max_drafts=4),
        eos_token_ids=[tokens[6]],
        speculate=Speculation(drafter, adapts=False),
    )
    for sampling, expected, reason in (
        (Sampling(max_new_tokens=12), tokens[:7], "stop"),
        (Sampling(max_new_tokens=5), tokens[:5], "length"),
        (Sampling(max_new_tokens=12, ignore_eos=True), tokens, "length"),
    ):
        [output] = engine.generate([[5, 6]], sampling)
        assert (output.tokens, output.finish_reason) == (expected, reason)
    assert len(drafter.forgotten) >= 3
    assert engine.runner.live == []


def test_logprobs_are_those_without():
    sampling = Sampling(max_new_tokens=10, logprobs=2, prompt_logprobs=1)
    plain = served(sampling, engine=Engine(FakeRunner()))
    assert served(sampling, engine=knowing(sampling)) == plain


def test_a_processor_sees_each_history_once():
    seen: list[tuple[int, ...]] = []

    def note(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tokens))
        return logits

    sampling = Sampling(max_new_tokens=9, logits_processor=note)
    served(sampling, engine=Engine(FakeRunner()))
    expected = sorted(seen)
    engine = knowing(sampling)
    seen.clear()
    served(sampling, engine=engine)
    assert sorted(seen) == expected


def test_not_a_number_inside_of_drafts():
    """It ends a request that gets there, and nobody else's, as without drafts."""
    tokens = alone([5, 6], Sampling(max_new_tokens=12))
    poisoned = digest_of([5, 6, *tokens[:4]])
    drafter = Knowing(lambda _: tokens, share=1.0)
    runner = FakeRunner(max_drafts=4)
    runner.poisoned = {poisoned}
    engine = Engine(runner, speculate=Speculation(drafter, adapts=False))
    [output] = engine.generate([[5, 6]], Sampling(max_new_tokens=12))
    assert (output.finish_reason, output.tokens) == ("error", tokens[:4])
    assert "NaN" in output.error
    wrong = Knowing(lambda _: [*tokens[:3], (tokens[3] + 1) % 50], share=1.0)
    runner.poisoned = {digest_of([5, 6, *tokens[:3], (tokens[3] + 1) % 50])}
    engine = Engine(runner, speculate=Speculation(wrong, adapts=False))
    [output] = engine.generate([[5, 6]], Sampling(max_new_tokens=12))
    assert (output.finish_reason, output.tokens) == ("length", tokens)


def test_what_raises_in_a_step_is_recomputed():
    sampling = Sampling(max_new_tokens=24)
    plain = served(sampling, engine=Engine(FakeRunner()))
    engine = knowing(sampling)
    engine.runner.raise_at = {9: RuntimeError("planned"), 15: KeyboardInterrupt()}
    requests = [engine.submit(prompt, sampling) for prompt in PROMPTS]
    for index, request in enumerate(requests):
        request.index = index
    num_raised = 0
    while engine.has_unfinished:
        try:
            engine.step()
        except (RuntimeError, KeyboardInterrupt):
            num_raised += 1
    assert num_raised == 2
    assert [request.output.tokens for request in requests] == [o.tokens for o in plain]
    assert engine.runner.live == []


def test_a_cancel_between_steps():
    sampling = Sampling(max_new_tokens=24)
    engine = knowing(sampling, share=1.0)
    first, second = (engine.submit(PROMPTS[0], sampling) for _ in range(2))
    while len(first.tokens) < 5:
        engine.step()
    engine.cancel(first)
    while engine.has_unfinished:
        engine.step()
    assert first.output.tokens == second.output.tokens[: len(first.output.tokens)]
    assert engine.runner.live == []


@pytest.mark.parametrize("run_ahead", ["on", "off"])
def test_plain_steps_run_ahead_where_nothing_is_drafted(run_ahead: str):
    """The same tokens; and a request at rest is not waited for."""
    sampling = Sampling(max_new_tokens=60)
    plain = served(sampling, engine=Engine(FakeRunner(num_pages=200)))
    drafter = Knowing(lambda _: [0] * 99, share=1.0)
    runner = FakeRunner(max_drafts=4, num_pages=200)
    engine = Engine(runner, run_ahead=run_ahead, speculate=Speculation(drafter))
    assert served(sampling, engine=engine) == plain
    assert engine.stats().drafts.accepted < 20
    assert bool(runner.launches) == (run_ahead == "on")


def test_the_first_step_of_a_size_is_told_from_others(monkeypatch: pytest.MonkeyPatch):
    """It was captured, or compiled."""
    are_first = []
    monkeypatch.setattr(Pace, "note_step", lambda *_, is_first: are_first.append(is_first))
    engine = Engine(
        FakeRunner(max_drafts=4), speculate=Speculation(Knowing(lambda _: [], share=0.0))
    )
    engine.submit([1, 2, 3], Sampling(max_new_tokens=5))
    for num_buckets in (0, 1, 1, 2, 2):
        engine.runner.num_buckets = num_buckets
        engine.step()
    assert are_first == [True, False, True, False]


def test_tokens_are_distributed_as_without():
    """Chi-square over many seeds of a token that a draft is tried for, filtered and biased."""
    runner = FakeRunner(max_drafts=1, max_seqs=64, max_tokens=256, num_pages=400)
    first, bias, num_draws = 11, {7: 1.5, 9: -math.inf}, 3000

    def begin_with_first(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(logits, -math.inf)
        forced[first] = 0.0
        return forced if len(tokens) == 1 else logits

    row = runner.logits[digest_of([3, first]) % len(runner.logits)].double()
    row[7] += 1.5
    row[9] = -math.inf
    kept = row.topk(8)
    expected = (kept.values / 1.3).softmax(0) * num_draws
    draft = int(kept.indices[1])

    class Always:
        def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
            return [[draft][:count] for count in counts]

        def forget(self, request: Request) -> None:
            pass

    engine = Engine(runner, speculate=Speculation(Always(), num_drafts=1, adapts=False))
    samplings = [
        Sampling(
            max_new_tokens=3,
            temperature=1.3,
            top_k=8,
            seed=seed,
            logit_bias=bias,
            logits_processor=begin_with_first,
        )
        for seed in range(num_draws)
    ]
    counts = torch.zeros(len(row), dtype=torch.float64)
    for output in engine.generate([[3]] * num_draws, samplings):
        counts[output.tokens[1]] += 1
    observed = counts[kept.indices]
    assert observed.sum() == num_draws
    assert engine.stats().drafts.accepted == observed[1]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert statistic < 24.3  # 7 degrees of freedom: exceeded once in a thousand


def test_a_draft_beyond_the_vocabulary_is_just_wrong():
    sampling = Sampling(max_new_tokens=12)
    drafter = Knowing(lambda request: [*range(46, 60), *range(40)], share=1.0)
    engine = Engine(FakeRunner(max_drafts=4), speculate=Speculation(drafter, adapts=False))
    assert served(sampling, engine=engine) == served(sampling, engine=Engine(FakeRunner()))
    assert engine.stats().drafts.drafted > 0


def test_what_an_engine_refuses():
    with pytest.raises(ValueError, match="needs a runner of as many max_drafts, got max_drafts=2"):
        Engine(FakeRunner(max_drafts=2), speculate=Speculation(num_drafts=3))
    with pytest.raises(TypeError, match=r"must be a th\.Speculation or None, got 'ngram'"):
        Engine(FakeRunner(max_drafts=2), speculate="ngram")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_drafts must be at least 1, got 0"):
        Speculation(num_drafts=0)
    with pytest.raises(ValueError, match=r"'mtp'.*, a Runner or a Drafter, got 'eagle'"):
        Speculation("eagle")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"'mtp'.*, a Runner or a Drafter, got 7"):
        Speculation(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shortest must be within 1 and longest = 4, got 5"):
        Ngram(shortest=5)
