"""What one request raises ends that request alone; nothing is lost, others do not change."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.fake_runner import FakeRunner, alone
from torch_hybrid.sampling import Sampling
from torch_hybrid.serving.engine import Engine


class RandomNumbers:
    """A tokenizer whose text of a token is its number; some tokens it cannot decode."""

    def __init__(self, unknown=()):
        self.unknown = set(unknown)

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, token_ids, *, skip_special_tokens):
        if self.unknown.intersection(token_ids):
            raise KeyError(f"no text for {sorted(self.unknown.intersection(token_ids))}")
        return "".join(f"{token} " for token in token_ids)


def fails_after(num_calls, error):
    """A processor that changes nothing, and raises at its n-th call."""
    calls = 0

    def processor(tokens, logits):
        nonlocal calls
        calls += 1
        if calls > num_calls:
            raise error
        return logits

    return processor


def run_all(engine):
    for _ in range(10_000):
        if not engine.has_unfinished:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def test_a_processor_that_raises_ends_its_request_with_the_reason():
    runner = FakeRunner()
    plain = Sampling(max_new_tokens=8)
    bad = Sampling(max_new_tokens=8, logits_processor=fails_after(3, ZeroDivisionError("oh")))
    outputs = sorted(Engine(runner).generate([[1, 2], [3]], [bad, plain]), key=lambda o: o.index)
    assert outputs[0].finish_reason == "error"
    assert outputs[0].error == "the rules on its logits raised ZeroDivisionError: oh"
    assert outputs[0].tokens == alone([1, 2], plain)[:3]
    assert outputs[1].tokens == alone([3], plain)
    assert runner.live == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_tokenizer_that_raises_ends_its_request_with_the_reason(stream):
    runner = FakeRunner()
    plain = Sampling(max_new_tokens=8)
    tokens = alone([1, 2], plain)
    engine = Engine(runner, RandomNumbers(unknown=[tokens[4]]))
    request = engine.submit([1, 2], plain, stream=stream)
    other = engine.submit([9], plain, stream=stream)
    events = []
    while engine.has_unfinished:
        events += [event for event in engine.step() if event.request is request]
    output = request.output
    assert output.finish_reason == "error"
    assert "detokenizing raised KeyError: 'no text for" in output.error
    if stream:
        assert output.tokens == tokens[:5]
        assert "".join(event.text for event in events) == output.text
    if tokens[4] not in alone([9], plain):
        assert other.output.finish_reason == "length"
    assert other.output.tokens[:4] == alone([9], plain)[:4]
    assert runner.live == []


def test_ctrl_c_in_a_callback_is_the_users_and_ends_nothing():
    runner = FakeRunner()
    engine = Engine(runner)
    interrupted = Sampling(max_new_tokens=4, logits_processor=fails_after(1, KeyboardInterrupt()))
    request = engine.submit([1], interrupted)
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert request.output is None
    assert runner.live == []


@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 10_000))
def test_random_requests_of_which_some_raise_leave_the_others_tokens(seed):
    """Processors and tokenizers that raise at random places, in pools that preempt."""
    rng = random.Random(seed)
    runner = FakeRunner(
        max_seqs=rng.randint(1, 5), max_tokens=rng.randint(4, 20), num_pages=rng.randint(10, 24)
    )
    engine = Engine(runner, RandomNumbers(unknown=rng.sample(range(50), rng.randint(0, 3))))
    requests = []
    for _ in range(10):
        length = rng.randrange(1, 20)
        options = {
            "max_new_tokens": rng.randrange(1, 12),
            "temperature": rng.choice([0.0, 1.0]),
            "seed": rng.randrange(9),
        }
        num_calls = rng.randrange(8)
        raises = rng.random() < 0.4
        if raises:
            error = rng.choice([ValueError("bad"), RuntimeError("worse"), IndexError("worst")])
            processor = fails_after(num_calls, error)
        prompt = [rng.randrange(50) for _ in range(length)]
        sampling = Sampling(**options, logits_processor=processor if raises else None)
        request = engine.submit(prompt, sampling, stream=rng.random() < 0.5)
        requests.append((request, options, num_calls if raises else None))
    run_all(engine)
    assert runner.live == []
    assert not engine._scheduler.running
    assert not engine._scheduler.waiting
    for request, options, num_calls in requests:
        output, expected = request.output, alone(request.prompt, Sampling(**options))
        assert output.tokens == expected[: len(output.tokens)]
        if output.error is None:
            assert output.finish_reason == "length"
            assert output.tokens == expected
        elif "the rules on its logits" in output.error:
            assert len(output.tokens) == num_calls
        else:
            assert engine.tokenizer.unknown.intersection(output.tokens)
        if num_calls is not None and num_calls < len(expected):
            assert output.finish_reason == "error"


def test_the_rules_of_one_row_do_not_touch_the_next():
    runner = FakeRunner()
    plain = Sampling(max_new_tokens=6)
    ruled = Sampling(max_new_tokens=6, repetition_penalty=2.0, logit_bias={1: 3.0})
    outputs = list(Engine(runner).generate([[1], [2], [3]], [plain, ruled, plain]))
    tokens = {output.index: output.tokens for output in outputs}
    assert tokens[0] == alone([1], plain)
    assert tokens[2] == alone([3], plain)
    assert tokens[1] != alone([2], plain)


def test_a_processor_can_force_tokens():
    def only_seven(tokens, logits):
        return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor([7]), 0.0)

    sampling = Sampling(max_new_tokens=3, temperature=1.0, logits_processor=only_seven)
    (output,) = Engine(FakeRunner()).generate([1, 2], sampling)
    assert output.tokens == [7, 7, 7]
