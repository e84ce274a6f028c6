"""What else a request can ask for: more outputs, log-probabilities, a deadline, a short queue."""

import pickle

import pytest
import torch

from tests.serving.fake_runner import FakeRunner, alone, digest_of
from torch_hybrid.errors import CapacityError, PromptTooLongError
from torch_hybrid.sampling import Sampling
from torch_hybrid.serving import engine as engine_module
from torch_hybrid.serving.engine import Engine


def test_n_outputs_have_consecutive_seeds():
    sampling = Sampling(max_new_tokens=5, temperature=1.0, seed=3, n=3)
    outputs = list(Engine(FakeRunner()).generate([[1, 2], [4]], sampling))
    got = {(output.index, output.sample): output.tokens for output in outputs}
    for index, prompt in enumerate([[1, 2], [4]]):
        for sample in range(3):
            alike = Sampling(max_new_tokens=5, temperature=1.0, seed=3 + sample)
            assert got.pop((index, sample)) == alone(prompt, alike)
    assert not got


def test_submit_queues_all_n_outputs_or_none():
    sampling = Sampling(max_new_tokens=5, temperature=1.0, seed=3, n=3)
    engine = Engine(FakeRunner(), max_waiting=3)
    first = engine.submit([1, 2], sampling)
    with pytest.raises(CapacityError, match="3 requests wait already and 3 more came"):
        engine.submit([4], sampling)
    while engine.has_unfinished:
        engine.step()
    assert [request.sample for request in first.samples] == [0, 1, 2]
    for request in first.samples:
        alike = Sampling(max_new_tokens=5, temperature=1.0, seed=3 + request.sample)
        assert request.output.tokens == alone([1, 2], alike)
    only = engine.submit([4], sampling=Sampling(max_new_tokens=1))
    assert only.samples == (only,)


def test_prepared_requests_are_queued_together_or_not_at_all():
    engine = Engine(FakeRunner(), max_waiting=3)
    sampling = Sampling(max_new_tokens=5, temperature=1.0, seed=3, n=2)
    first, second = engine.prepare([1, 2], sampling), engine.prepare([4], sampling)
    assert not engine.has_unfinished
    with pytest.raises(CapacityError, match="0 requests wait already and 4 more came"):
        engine.enqueue([first, second])
    engine.enqueue([first])
    with pytest.raises(ValueError, match="a request is queued once"):
        engine.enqueue([second, first])
    while engine.has_unfinished:
        engine.step()
    outputs = [request.output.tokens for request in first.samples]
    seeds = [Sampling(max_new_tokens=5, temperature=1.0, seed=seed) for seed in (3, 4)]
    assert outputs == [alone([1, 2], seed) for seed in seeds]
    assert second.output is None


def test_a_prompt_without_room_tells_its_length():
    with pytest.raises(PromptTooLongError, match="more than the 3 tokens") as error:
        Engine(FakeRunner()).prepare([1, 2, 3], Sampling(max_length=3))
    sent = pickle.loads(pickle.dumps(error.value))  # to another process
    assert (sent.num_tokens, str(sent)) == (3, str(error.value))


def test_requests_count_the_steps_that_raised_while_they_ran(monkeypatch):
    runner = FakeRunner(max_seqs=1)
    engine = Engine(runner)
    running, waiting = engine.submit([1]), engine.submit([2])

    def broken(rows):
        raise MemoryError

    with monkeypatch.context() as broken_steps:
        broken_steps.setattr(engine._loop, "_start", broken)
        with pytest.raises(MemoryError):
            engine.step()
    assert (running.num_restarts, waiting.num_restarts) == (1, 0)
    while engine.has_unfinished:
        engine.step()
    assert running.output.tokens == alone([1], Sampling())


def test_preemptions_are_counted():
    engine = Engine(FakeRunner(max_seqs=2, num_pages=6))
    list(engine.generate([[1] * 5, [2] * 5], Sampling(max_new_tokens=16)))
    assert engine.stats().num_preemptions >= 1
    assert Engine(FakeRunner()).stats().num_preemptions == 0


def expected_logprobs(runner, tokens, start):
    """Of ``tokens[start:]``, each after those before it."""
    rows = [runner.logits[digest_of(tokens[:end]) % 997] for end in range(start, len(tokens))]
    every = torch.stack(rows).log_softmax(-1)
    return [float(row[token]) for row, token in zip(every, tokens[start:], strict=True)]


def test_logprobs_are_the_models_own_whatever_the_rules():
    runner = FakeRunner()
    sampling = Sampling(max_new_tokens=6, temperature=0.5, seed=1, logprobs=2, logit_bias={4: 2.0})
    (output,) = Engine(runner).generate([5, 6], sampling)
    assert [entry.token for entry in output.logprobs] == output.tokens
    assert {len(entry.top) for entry in output.logprobs} == {2}
    got = [entry.logprob for entry in output.logprobs]
    assert got == pytest.approx(expected_logprobs(runner, [5, 6, *output.tokens], 2), abs=1e-5)
    assert output.prompt_logprobs is None


@pytest.mark.parametrize("num_pages", [12, 40])
def test_prompt_logprobs_come_once_however_a_prompt_is_cut_or_run_again(num_pages):
    runner = FakeRunner(max_tokens=7, num_pages=num_pages)
    prompts = [[1], [2, 3], list(range(20)), [7] * 16]
    sampling = Sampling(max_new_tokens=24, prompt_logprobs=1)
    for output in Engine(runner).generate(prompts, sampling):
        prompt = output.prompt
        assert [entry.token for entry in output.prompt_logprobs] == prompt[1:]
        if len(prompt) > 1:
            got = [entry.logprob for entry in output.prompt_logprobs]
            assert got == pytest.approx(expected_logprobs(runner, prompt, 1), abs=1e-5)
        assert output.tokens == alone(prompt, sampling)
        assert output.logprobs is None


def test_min_new_tokens_bars_the_ends():
    tokens = alone([5, 6], Sampling(max_new_tokens=8))
    engine = Engine(FakeRunner(), eos_token_ids=[tokens[1], 10_000])
    early, late = engine.generate(
        [[5, 6], [5, 6]], [Sampling(max_new_tokens=8), Sampling(max_new_tokens=8, min_new_tokens=5)]
    )
    assert early.tokens == tokens[:2]
    assert len(late.tokens) >= 5
    assert tokens[1] not in late.tokens[:4]


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(engine_module.time, "monotonic", lambda: self.now)


def test_a_deadline_ends_a_request_with_what_it_has(monkeypatch):
    clock, runner = Clock(monkeypatch), FakeRunner(max_seqs=2)
    engine = Engine(runner)
    timed = engine.submit([1], Sampling(max_new_tokens=50), timeout_s=5)
    free = engine.submit([2], Sampling(max_new_tokens=50))
    waiting = engine.submit([3], Sampling(max_new_tokens=50), timeout_s=9)
    engine.step()
    clock.now += 6
    events = engine.step()
    assert (timed.output.finish_reason, len(timed.output.tokens)) == ("timeout", 1)
    assert [event.output for event in events if event.request is timed] == [timed.output]
    clock.now += 6
    engine.step()
    assert waiting.output.finish_reason == "timeout"
    while engine.has_unfinished:
        engine.step()
    assert free.output.finish_reason == "length"
    assert runner.live == []


def test_a_deadline_of_generate_counts_from_its_first_step(monkeypatch):
    clock = Clock(monkeypatch)
    engine = Engine(FakeRunner())
    outputs = engine.generate([[1], [2]], Sampling(max_new_tokens=50), timeout_s=3, stream=True)
    clock.now += 100
    taken = 0
    for event in outputs:
        taken += event.token is not None
        clock.now += 0.5
        if event.output is not None:
            assert event.output.finish_reason == "timeout"
    assert taken > 2


@pytest.mark.parametrize("timeout_s", [0, -1.0, "soon", float("nan")])
def test_refuses_a_deadline_that_is_none(timeout_s):
    with pytest.raises(ValueError, match="timeout_s must be above 0 or None"):
        Engine(FakeRunner()).submit([1], timeout_s=timeout_s)


def test_the_queue_has_a_limit():
    runner = FakeRunner(max_seqs=1)
    engine = Engine(runner, max_waiting=2)
    first = engine.submit([1], Sampling(max_new_tokens=3))
    engine.step()
    others = [engine.submit([2]), engine.submit([3])]
    with pytest.raises(
        CapacityError, match=r"2 requests wait already and 1 more .* max_waiting = 2"
    ):
        engine.submit([4])
    with pytest.raises(CapacityError, match="2 requests wait already and 2 more came"):
        list(engine.generate([[4], [5]]))
    while engine.has_unfinished:
        engine.step()
    assert [request.output.finish_reason for request in (first, *others)] == ["length"] * 3
    assert runner.live == []
    with pytest.raises(ValueError, match="max_waiting must be at least 1 or None, got 0"):
        Engine(runner, max_waiting=0)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": 1.0}, r"sampling must be a th.Sampling, got {'temperature': 1.0}"),
        ([Sampling(), 3], "prompt 1: sampling must be a th.Sampling, got 3"),
        (None, "sampling must be a th.Sampling, got None"),
    ],
)
def test_refuses_what_is_no_sampling(sampling, message):
    with pytest.raises(TypeError, match=message):
        Engine(FakeRunner()).generate([[1], [2]], sampling)


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
def test_refuses_ids_that_the_vocabulary_lacks(field):
    value = {50: 1.0} if field == "logit_bias" else [50]
    with pytest.raises(ValueError, match=f"{field} must be within 0 and 49, got 50"):
        Engine(FakeRunner()).submit([1], Sampling(**{field: value}))
