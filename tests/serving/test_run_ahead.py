"""Running ahead changes no token, and who has ended holds nothing once its last step has landed."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.fake_runner import FakeRunner, alone, digest_of
from tests.serving.test_engine import interrupted_at, pools
from torch_hybrid.errors import CapacityError
from torch_hybrid.sampling import Sampling
from torch_hybrid.serving.engine import Engine

PROMPTS = [[1, 2, 3], [7], list(range(40)), [4, 4], [9] * 11]


def run_all(engine):
    events = []
    for _ in range(10_000):
        if not engine.has_unfinished:
            return events
        events += engine.step()
    raise AssertionError("the engine does not come to an end")


def ahead(runner, **options):
    return Engine(runner, run_ahead="on", **options)


def under_way(runner):
    return [launched for launched in runner.launches if not launched.is_waited_for]


def test_names_of_the_option():
    with pytest.raises(ValueError, match="run_ahead must be 'auto', 'on' or 'off', got True"):
        Engine(FakeRunner(), run_ahead=True)
    captured = FakeRunner()
    captured.captures = True
    runners = {"auto": FakeRunner(), "off": captured, "on": FakeRunner()}
    assert {x: Engine(r, run_ahead=x).runs_ahead for x, r in runners.items()} == {
        "auto": False,
        "off": False,
        "on": True,
    }
    assert Engine(captured).runs_ahead


def test_the_next_step_starts_before_the_tokens_of_the_last_are_read():
    runner = FakeRunner()
    engine = ahead(runner)
    request = engine.submit([1, 2], Sampling(max_new_tokens=4))
    for count in range(1, 4):
        events = engine.step()
        assert [event.token for event in events] == request.history[-1:]
        assert (len(request.history), len(runner.launches), len(under_way(runner))) == (
            2 + count,
            2,
            1,
        )
    engine.step()
    assert request.output.tokens == alone([1, 2], Sampling(max_new_tokens=4))
    assert runner.num_extends == 4, "the last token is known to be the last: nothing is wasted"
    assert (engine.has_unfinished, runner.live) == (False, [])


def test_chunks_of_a_prompt_and_what_follows_them_start_ahead_too():
    """Each step is launched while the one before it is under way, the first decode step as well."""
    runner = FakeRunner()  # of 32 tokens a step
    engine = ahead(runner)
    prompt = list(range(40)) + list(range(40))
    request = engine.submit(prompt, Sampling(max_new_tokens=3))
    for num_launches in (2, 3, 4, 5, 5):
        engine.step()
        assert runner.num_extends == num_launches
        assert len(under_way(runner)) == (request.output is None)
    assert request.output.tokens == alone(prompt, Sampling(max_new_tokens=3))


def test_a_step_beyond_a_stop_is_dropped_and_its_sequence_freed_after_it():
    runner = FakeRunner()
    tokens = alone([5, 6], Sampling(max_new_tokens=8))
    engine = ahead(runner, eos_token_ids=[tokens[2]])
    request = engine.submit([5, 6], Sampling(max_new_tokens=8))
    while request.output is None:
        events = engine.step()
    assert [event.output for event in events] == [request.output], "told at once"
    assert request.output.tokens == tokens[:3]
    assert (len(runner.live), engine.has_unfinished) == (1, True)
    assert engine.step() == []
    assert (runner.live, engine.has_unfinished) == ([], False)


def test_generate_waits_for_what_is_under_way_when_it_is_done():
    runner = FakeRunner()
    tokens = alone([5, 6], Sampling(max_new_tokens=8))
    engine = ahead(runner, eos_token_ids=[tokens[2]])
    [output] = engine.generate([5, 6], Sampling(max_new_tokens=8))
    assert output.tokens == tokens[:3]
    assert (runner.live, engine.has_unfinished) == ([], False)


@pytest.mark.parametrize("leave", ["cancel", "close", "timeout", "iterator"])
def test_who_leaves_while_a_step_is_under_way_gets_nothing_of_it(leave, monkeypatch):
    runner = FakeRunner()
    engine = ahead(runner)
    sampling = Sampling(max_new_tokens=20, temperature=1.0, seed=4)
    events = engine.generate([[3], [9, 9]], sampling, stream=True, timeout_s=100)
    for _ in range(6):
        request = next(events).request
    other = engine.submit([8], Sampling(max_new_tokens=5))
    engine.step()
    if leave == "cancel":
        engine.cancel(request)
    elif leave == "close":
        engine.close()
    elif leave == "timeout":
        request.deadline = engine._next_deadline = 0.0
        engine.step()
    else:
        events.close()
    taken = len(request.output.tokens)
    list(events)
    run_all(engine)
    assert request.output.tokens == alone(request.prompt, sampling)[:taken]
    if leave != "close":
        assert other.output.tokens == alone([8], Sampling(max_new_tokens=5))
    assert (runner.live, under_way(runner)) == ([], [])


def test_bad_logits_end_their_request_though_it_went_on():
    runner = FakeRunner()
    sampling = Sampling(max_new_tokens=8)
    tokens = alone([1, 2], sampling)
    runner.poisoned.add(digest_of([1, 2, *tokens[:3]]))
    bad, good = sorted(ahead(runner).generate([[1, 2], [3]], sampling), key=lambda o: o.index)
    assert (bad.finish_reason, bad.tokens) == ("error", tokens[:3])
    assert bad.error == "the logits after 5 tokens have NaN or infinite values"
    assert good.tokens == alone([3], sampling)
    assert runner.live == []


def test_who_needs_the_host_is_sampled_by_it_and_the_others_run_ahead_after_that():
    runner = FakeRunner()
    engine = ahead(runner)
    plain = Sampling(max_new_tokens=12, temperature=0.8, seed=1)
    needy = [
        Sampling(max_new_tokens=3, repetition_penalty=1.5),
        Sampling(max_new_tokens=3, logprobs=1),
        Sampling(max_new_tokens=5, prompt_logprobs=0),
        Sampling(max_new_tokens=4, min_new_tokens=2),
    ]
    outputs = sorted(engine.generate([[1], [2], [3, 4, 5], [6], [7]], [plain, *needy]), key=_index)
    reference = FakeRunner()
    same = sorted(
        Engine(reference).generate([[1], [2], [3, 4, 5], [6], [7]], [plain, *needy]), key=_index
    )
    assert outputs == same
    assert runner.launches, "once the others have ended, the first runs ahead"


def _index(output):
    return output.index


def test_a_needy_request_that_waits_is_admitted_though_the_others_run_ahead():
    runner = FakeRunner(max_seqs=2)
    engine = ahead(runner)
    first = engine.submit([1], Sampling(max_new_tokens=30))
    engine.step()
    needy = engine.submit([2], Sampling(max_new_tokens=3, logprobs=1))
    for _ in range(5):
        engine.step()
    assert needy.output.tokens == alone([2], Sampling(max_new_tokens=3))
    run_all(engine)
    assert first.output.tokens == alone([1], Sampling(max_new_tokens=30))


def test_nothing_is_preempted_under_a_step_that_is_under_way():
    """``FakeRunner.free`` refuses what a step uses; here the pool is short all the time."""
    runner = FakeRunner(num_pages=10)
    sampling = Sampling(max_new_tokens=24, temperature=1.0, seed=2)
    made = []
    new_sequences = runner.new_sequences
    runner.new_sequences = lambda n, **of: made.append(n) or new_sequences(n, **of)
    outputs = list(ahead(runner).generate([[1] * 4, [2] * 4, [3] * 4], sampling))
    assert len(made) > 3, "the pool is small enough that something is preempted"
    for output in outputs:
        assert output.tokens == alone(output.prompt, sampling)
    assert runner.live == []


def test_a_step_that_raises_takes_the_one_under_way_with_it_and_both_run_again():
    runner = FakeRunner()
    runner.raise_at = {3: RuntimeError("in the kernel")}
    engine = ahead(runner)
    sampling = Sampling(max_new_tokens=6, temperature=1.0, seed=4)
    requests = [engine.submit(prompt, sampling) for prompt in ([1, 2], [3])]
    engine.step()
    with pytest.raises(RuntimeError, match="in the kernel"):
        engine.step()
    assert (runner.live, under_way(runner)) == ([], [])
    run_all(engine)
    for request in requests:
        assert request.output.tokens == alone(request.prompt, sampling)


def test_pages_held_elsewhere_are_an_error_after_what_is_under_way_has_landed():
    runner = FakeRunner(num_pages=4)
    engine = ahead(runner)
    request = engine.submit([1, 2, 3], Sampling(max_new_tokens=9))
    engine.step()
    (held,) = runner.new_sequences(1)
    runner.extend([held], [[1] * 12])
    engine.step()
    with pytest.raises(CapacityError, match="5 tokens needs a slot and 2 pages"):
        engine.step()
    runner.free([held])
    run_all(engine)
    assert request.output.tokens == alone([1, 2, 3], Sampling(max_new_tokens=9))


def test_ctrl_c_at_any_line_frees_everything():
    line_number = 0
    while True:
        line_number += 1
        runner = FakeRunner(num_pages=9, max_tokens=16)
        was_interrupted = interrupted_at(
            line_number, runner, prompts=[[1, 2, 3], [4] * 20], num_new=3, run_ahead="on"
        )
        assert runner.live == [], f"something leaks at line {line_number}"
        if not was_interrupted:
            break
    assert line_number > 500


@settings(deadline=None, max_examples=30)
@given(sizes=pools, seed=st.integers(0, 10_000))
def test_random_requests_get_the_tokens_that_they_get_alone(sizes, seed):
    """Stops, cancels, failures, Ctrl-C, rules and bad logits, in pools that preempt."""
    rng = random.Random(seed)
    runner = FakeRunner(**sizes)
    runner.raise_at = {
        rng.randrange(1, 60): rng.choice([KeyboardInterrupt(), RuntimeError("in the kernel")])
        for _ in range(rng.randrange(3))
    }
    engine = ahead(runner, eos_token_ids=[0, 1, 2])
    requests = []
    for _ in range(2000):
        if len(requests) < 12 and rng.random() < 0.4:
            length = rng.randrange(1, runner.max_seq_len)
            prompt = [rng.randrange(runner.vocab_size) for _ in range(length)]
            requests.append(engine.submit(prompt, random_sampling(rng, runner, length)))
        if requests and rng.random() < 0.02:
            engine.cancel(rng.choice(requests))
        try:
            engine.step()
        except (KeyboardInterrupt, RuntimeError):
            assert runner.live == []
        if len(requests) == 12 and not engine.has_unfinished:
            break
    assert (runner.live, under_way(runner)) == ([], [])
    assert not engine.has_unfinished
    for request in requests:
        expected = expected_tokens(request)
        got = request.output.tokens
        is_cut = request.output.finish_reason == "cancelled"
        assert got == (expected[: len(got)] if is_cut else expected)


def random_sampling(rng, runner, length):
    return Sampling(
        max_new_tokens=rng.randrange(1, runner.max_seq_len - length + 2),
        temperature=rng.choice([0.0, 1.0]),
        top_k=rng.choice([0, 5]),
        top_p=rng.choice([1.0, 1.0, 1.0, 0.8]),
        seed=rng.randrange(9),
        logprobs=rng.choice([None, None, None, 0]),
    )


def expected_tokens(request):
    sampling = request.sampling
    return alone(
        request.prompt,
        Sampling(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop_token_ids=[0, 1, 2],
        ),
    )
