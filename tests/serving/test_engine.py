"""The engine over a fake runner: each request gets its own tokens, and everything comes back."""

import random
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.fake_runner import FakeRunner, alone, digest_of
from torch_hybrid.errors import CapacityError
from torch_hybrid.sampling import Sampling
from torch_hybrid.serving import engine as engine_module
from torch_hybrid.serving import in_flight as flight_module
from torch_hybrid.serving import request as request_module
from torch_hybrid.serving import scheduler as scheduler_module
from torch_hybrid.serving import step_loop as step_loop_module
from torch_hybrid.serving.engine import Engine


def finish(engine):
    """Step until nothing is left; the events by request."""
    events = {}
    for _ in range(10_000):
        if not engine.has_unfinished:
            return events
        for event in engine.step():
            events.setdefault(event.request, []).append(event)
    raise AssertionError("the engine does not come to an end")


def assert_all_returned(runner):
    assert runner.live == []


PROMPTS = [[1, 2, 3], [7], list(range(40)), [4, 4], [9] * 11]


def test_generate_gives_each_prompt_its_own_tokens():
    runner = FakeRunner()
    sampling = Sampling(max_new_tokens=10)
    outputs = list(Engine(runner).generate(PROMPTS, sampling))
    assert sorted(output.index for output in outputs) == [0, 1, 2, 3, 4]
    for output in outputs:
        assert output.prompt == PROMPTS[output.index]
        assert output.tokens == alone(output.prompt, sampling)
        assert (output.finish_reason, output.error, output.text) == ("length", None, None)
    assert_all_returned(runner)


def test_outputs_come_as_they_finish():
    samplings = [Sampling(max_new_tokens=count) for count in (9, 2, 5)]
    outputs = Engine(FakeRunner()).generate([[1], [2], [3]], samplings)
    assert [output.index for output in outputs] == [1, 2, 0]


def test_streaming_yields_every_token_and_the_output_last():
    sampling = Sampling(max_new_tokens=6)
    events = list(Engine(FakeRunner()).generate(PROMPTS, sampling, stream=True))
    for index, prompt in enumerate(PROMPTS):
        mine = [event for event in events if event.request.index == index]
        assert [event.token for event in mine] == alone(prompt, sampling)
        assert [event.output is None for event in mine] == [True] * 5 + [False]


def test_stop_tokens_end_a_request_and_ignore_eos_goes_on():
    tokens = alone([5, 6], Sampling(max_new_tokens=8))
    eos, end = tokens[2], tokens[4]
    engine = Engine(FakeRunner(), eos_token_ids=[eos])
    options = [
        Sampling(max_new_tokens=8),
        Sampling(max_new_tokens=8, ignore_eos=True),
        Sampling(max_new_tokens=8, ignore_eos=True, stop_token_ids=[end]),
    ]
    outputs = sorted(engine.generate([[5, 6]] * 3, options), key=lambda output: output.index)
    assert [output.tokens for output in outputs] == [tokens[:3], tokens, tokens[:5]]
    assert [output.finish_reason for output in outputs] == ["stop", "length", "stop"]


def test_a_seed_gives_the_same_tokens_in_any_company():
    sampling = Sampling(max_new_tokens=12, temperature=1.0, top_p=0.9, seed=11)
    engine = Engine(FakeRunner(num_pages=12))
    busy = [Sampling(max_new_tokens=9, temperature=0.7)] * 4
    outputs = engine.generate([[3, 1], *PROMPTS[:2], *PROMPTS[3:]], [sampling, *busy])
    assert next(o for o in outputs if o.index == 0).tokens == alone([3, 1], sampling)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt must have at least 1 token, got 0"),
        ([3, 50], {}, "token ids must be within 0 and 49, got 50"),
        ([-1], {}, "token ids must be within 0 and 49, got -1"),
        ([1] * 129, {"max_new_tokens": 1}, "hold up to 129 tokens, and a sequence can hold 128"),
        ([1] * 120, {"max_new_tokens": 10}, "120 tokens and max_new_tokens=10 hold up to 129"),
        ("text", {}, "a prompt must be tokens when the engine has no tokenizer, got a text"),
        ([1], {"stop": ["end"]}, r"stop texts need a tokenizer, got stop=\['end'\]"),
    ],
)
def test_bad_requests_are_refused_and_running_ones_go_on(prompt, options, message):
    runner = FakeRunner()
    engine = Engine(runner)
    running = engine.submit([1, 2], Sampling(max_new_tokens=5))
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, Sampling(**options))
    with pytest.raises(ValueError, match=f"prompt 1: .*{message}"):
        engine.generate(
            [[1], prompt],
            Sampling(**options) if "stop" not in options else [Sampling(), Sampling(**options)],
        )
    finish(engine)
    assert running.output.tokens == alone([1, 2], Sampling(max_new_tokens=5))
    assert_all_returned(runner)


def test_one_prompt_alone_is_one_prompt():
    engine, sampling = Engine(FakeRunner()), Sampling(max_new_tokens=4)
    for prompt in ([1, 2, 3], (1, 2, 3), torch.tensor([1, 2, 3])):
        (output,) = engine.generate(prompt, sampling)
        assert output.tokens == alone([1, 2, 3], sampling)


def test_generate_refuses_a_wrong_number_of_samplings():
    engine = Engine(FakeRunner())
    with pytest.raises(ValueError, match="sampling must have 2 entries, got 1"):
        engine.generate([[1], [2]], [Sampling()])


def test_the_longest_request_that_fits_is_served():
    runner = FakeRunner(num_pages=8)
    sampling = Sampling(max_new_tokens=5)
    (output,) = Engine(runner).generate([[1] * 28], sampling)
    assert output.tokens == alone([1] * 28, sampling)


def test_bad_logits_end_only_their_own_request():
    runner = FakeRunner()
    sampling = Sampling(max_new_tokens=8)
    tokens = alone([1, 2], sampling)
    runner.poisoned.add(digest_of([1, 2, *tokens[:3]]))
    bars_all = Sampling(logits_processor=lambda tokens, logits: logits - float("inf"))
    served = Engine(runner).generate([[1, 2], [3], [4]], [sampling, sampling, bars_all])
    outputs = sorted(served, key=lambda o: o.index)
    assert outputs[0].finish_reason == "error"
    assert outputs[0].tokens == tokens[:3]
    assert outputs[0].error == "the logits after 5 tokens have NaN or infinite values"
    assert outputs[1].tokens == alone([3], sampling)
    assert outputs[2].error.endswith("infinite values, or rules bar all tokens")
    assert_all_returned(runner)


def test_preemption_recomputes_to_the_same_tokens():
    runner = FakeRunner(num_pages=10)
    sampling = Sampling(max_new_tokens=24, temperature=1.0, seed=2)
    made = []
    new_sequences = runner.new_sequences
    runner.new_sequences = lambda n, **of: made.append(n) or new_sequences(n, **of)
    outputs = list(Engine(runner).generate([[1] * 4, [2] * 4, [3] * 4], sampling))
    assert len(made) > 3, "the pool is small enough that something is preempted"
    for output in outputs:
        assert output.tokens == alone(output.prompt, sampling)
    assert_all_returned(runner)


def test_cancel_keeps_the_tokens_so_far_and_frees_at_once():
    runner = FakeRunner()
    engine = Engine(runner)
    first = engine.submit([1, 2], Sampling(max_new_tokens=9))
    second = engine.submit([3], Sampling(max_new_tokens=9))
    for _ in range(3):
        engine.step()
    engine.cancel(first)
    assert len(runner.live) == 1
    assert first.output.finish_reason == "cancelled"
    assert first.output.tokens == alone([1, 2], Sampling(max_new_tokens=9))[:3]
    engine.cancel(first)
    events = finish(engine)
    assert [event.output for event in events[first]] == [first.output]
    assert second.output.tokens == alone([3], Sampling(max_new_tokens=9))
    assert_all_returned(runner)


def test_a_streaming_consumer_can_cancel():
    engine = Engine(FakeRunner())
    counts = [0, 0]
    for event in engine.generate([[1], [2]], Sampling(max_new_tokens=9), stream=True):
        counts[event.request.index] += event.token is not None
        if event.request.index == 0 and counts[0] == 2:
            engine.cancel(event.request)
    assert counts == [2, 9]


def test_leaving_the_loop_early_frees_what_is_unfinished():
    runner = FakeRunner()
    engine = Engine(runner)
    other = engine.submit([8], Sampling(max_new_tokens=30))
    for _ in engine.generate(PROMPTS, Sampling(max_new_tokens=20), stream=True):
        break
    assert len(runner.live) == 1
    options = [Sampling(max_new_tokens=count) for count in (2, 20, 20, 20, 20)]
    for _ in engine.generate(PROMPTS, options):
        break
    assert len(runner.live) == 1
    finish(engine)
    assert other.output.tokens == alone([8], Sampling(max_new_tokens=30))
    assert_all_returned(runner)


def test_an_iterator_that_is_never_started_queues_nothing():
    engine = Engine(FakeRunner())
    engine.generate([[1]])
    assert not engine.has_unfinished


def test_two_iterators_share_the_steps():
    runner = FakeRunner()
    engine = Engine(runner)
    sampling = Sampling(max_new_tokens=7)
    first = engine.generate([[1], [2]], sampling, stream=True)
    second = engine.generate([[3]], sampling, stream=True)
    taken = {0: [], 1: [], 2: []}
    for iterator, offset in [(first, 0), (second, 2)] * 30:
        for event in iterator:
            taken[event.request.index + offset].append(event.token)
            break
    assert [taken[i] for i in range(3)] == [alone([i + 1], sampling) for i in range(3)]
    assert runner.num_extends < 10


def test_closing_the_engine_cancels_everything():
    runner = FakeRunner()
    with Engine(runner) as engine:
        requests = [engine.submit(prompt) for prompt in PROMPTS]
        engine.step()
    assert {request.output.finish_reason for request in requests} == {"cancelled"}
    assert_all_returned(runner)


def test_sequences_held_elsewhere_leave_no_room():
    runner = FakeRunner(max_seqs=1)
    held = runner.new_sequences(1)
    engine = Engine(runner)
    request = engine.submit([1, 2])
    with pytest.raises(
        CapacityError, match=r"needs a slot and 1 pages, .* 0 slots and 32 pages are free"
    ):
        engine.step()
    runner.free(held)
    finish(engine)
    assert request.output.finish_reason == "length"


def test_pages_taken_elsewhere_stop_a_running_request_with_an_error():
    runner = FakeRunner(num_pages=4)
    engine = Engine(runner)
    request = engine.submit([1, 2, 3, 4], Sampling(max_new_tokens=9))
    engine.step()
    (held,) = runner.new_sequences(1)
    runner.extend([held], [[1] * 12])
    with pytest.raises(CapacityError, match="5 tokens needs a slot and 2 pages"):
        engine.step()
    runner.free([held])
    finish(engine)
    assert request.output.tokens == alone([1, 2, 3, 4], Sampling(max_new_tokens=9))


def test_cancel_refuses_another_engines_request():
    runner = FakeRunner()
    engine, other = Engine(runner), Engine(runner)
    request = other.submit([1])
    with pytest.raises(ValueError, match="request 0 is not one of this engine's"):
        engine.cancel(request)
    finish(other)
    assert request.output.finish_reason == "length"


def test_the_event_of_a_cancel_comes_though_nothing_is_left_to_run():
    engine = Engine(FakeRunner())
    request = engine.submit([1])
    engine.cancel(request)
    events = finish(engine)
    assert [event.output for event in events[request]] == [request.output]


def test_prompts_can_be_tensors():
    (output,) = Engine(FakeRunner()).generate([torch.tensor([1, 2])], Sampling(max_new_tokens=3))
    assert output.prompt == [1, 2]
    assert output.tokens == alone([1, 2], Sampling(max_new_tokens=3))
    with pytest.raises(TypeError, match="float"):
        Engine(FakeRunner()).submit([1.5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([torch.nn.Linear(1, 1)], "runner must be a th.Runner, got Linear"),
        ([FakeRunner(), "path"], "tokenizer must be one of transformers, .* got 'path'"),
        ([FakeRunner(), None, 5], "eos_token_ids must be a list of tokens, got 5"),
    ],
)
def test_arguments_of_another_kind(arguments, message):
    with pytest.raises(TypeError, match=message):
        Engine(*arguments)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_an_exception_in_the_compute_recomputes_the_running_requests(error):
    runner = FakeRunner()
    runner.raise_at = {3: error}
    engine = Engine(runner)
    sampling = Sampling(max_new_tokens=6, temperature=1.0, seed=4)
    requests = [engine.submit(prompt, sampling) for prompt in PROMPTS]
    engine.step()
    engine.step()
    with pytest.raises(type(error)):
        engine.step()
    assert_all_returned(runner)
    finish(engine)
    for request in requests:
        assert request.output.tokens == alone(request.prompt, sampling)
    assert_all_returned(runner)


def test_an_exception_leaves_generate_with_nothing_held():
    runner = FakeRunner()
    runner.raise_at = {4: KeyboardInterrupt()}
    engine = Engine(runner)
    with pytest.raises(KeyboardInterrupt):
        list(engine.generate(PROMPTS, Sampling(max_new_tokens=30)))
    assert_all_returned(runner)
    assert not engine.has_unfinished


# Where an interrupt cannot be undone by the interrupted code itself: the cleaning up.
CLEANING = {"_free", "retire", "end", "discard", "restart", "__exit__", "close"}


def interrupted_at(
    line_number, runner, *, prompts=([1, 2, 3], [4] * 30, [5, 6]), num_new=4, **options
):
    """Serve with Ctrl-C at the n-th line that engine or scheduler run; False past the last."""
    modules = (engine_module, step_loop_module, flight_module, request_module, scheduler_module)
    files = {module.__file__ for module in modules}
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        code = frame.f_code
        if code.co_filename not in files or code.co_name in CLEANING:
            return None
        if event == "line":
            count += 1
            if count == line_number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    engine = Engine(runner, **options)
    events = engine.generate(prompts, Sampling(max_new_tokens=num_new), stream=True)
    sys.settrace(trace)
    try:
        for _ in events:
            pass
    except KeyboardInterrupt:
        events.close()
        return True
    finally:
        sys.settrace(None)
    return False


def test_ctrl_c_at_any_line_frees_everything():
    line_number = 0
    while True:
        line_number += 1
        runner = FakeRunner(num_pages=9, max_tokens=16)
        was_interrupted = interrupted_at(line_number, runner)
        assert runner.live == [], f"something leaks at line {line_number}"
        if not was_interrupted:
            break
    assert line_number > 500


pools = st.fixed_dictionaries(
    {
        "max_seqs": st.integers(1, 5),
        "max_tokens": st.integers(1, 20),
        "page_size": st.integers(1, 6),
        "num_pages": st.integers(8, 24),
    }
)


@settings(deadline=None, max_examples=60)
@given(sizes=pools, seed=st.integers(0, 10_000))
def test_random_arrivals_cancels_and_failures_change_nobody_elses_tokens(sizes, seed):
    rng = random.Random(seed)
    runner = FakeRunner(**sizes)
    runner.raise_at = {
        rng.randrange(1, 60): rng.choice([KeyboardInterrupt(), RuntimeError("in the kernel")])
        for _ in range(rng.randrange(3))
    }
    engine = Engine(runner, eos_token_ids=[0])
    requests = []
    for _ in range(2000):
        if len(requests) < 12 and rng.random() < 0.4:
            length = rng.randrange(1, runner.max_seq_len)
            sampling = Sampling(
                max_new_tokens=rng.randrange(1, runner.max_seq_len - length + 2),
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.randrange(9),
            )
            prompt = [rng.randrange(runner.vocab_size) for _ in range(length)]
            requests.append(engine.submit(prompt, sampling))
        if requests and rng.random() < 0.02:
            engine.cancel(rng.choice(requests))
        try:
            engine.step()
        except (KeyboardInterrupt, RuntimeError):
            assert_all_returned(runner)
        if len(requests) == 12 and not engine.has_unfinished:
            break
    assert_all_returned(runner)
    for request in requests:
        with_eos = Sampling(
            max_new_tokens=request.sampling.max_new_tokens,
            temperature=request.sampling.temperature,
            seed=request.sampling.seed,
            stop_token_ids=[0],
        )
        expected = alone(request.prompt, with_eos)
        if request.output.finish_reason == "cancelled":
            assert request.output.tokens == expected[: len(request.output.tokens)]
        else:
            assert request.output.tokens == expected


def test_a_step_of_32_decodes_costs_little_beside_the_model():
    """The schedule and bookkeeping of a step; the bound is several times what it takes."""
    runner = FakeRunner(max_seqs=32, num_pages=2000, max_tokens=2048, page_size=16)
    engine = Engine(runner)
    for _ in range(32):
        engine.submit([1] * 16, Sampling(max_new_tokens=400))
    engine.step()
    inside = 0.0

    def timed(function):
        def call(*args, **kwargs):
            nonlocal inside
            start = time.perf_counter()
            result = function(*args, **kwargs)
            inside += time.perf_counter() - start
            return result

        return call

    runner.extend = timed(runner.extend)
    flight_module.sample, sample = timed(flight_module.sample), flight_module.sample
    best = float("inf")
    try:
        for _ in range(200):
            inside, start = 0.0, time.perf_counter()
            engine.step()
            best = min(best, time.perf_counter() - start - inside)
    finally:
        flight_module.sample = sample
    print(f"host time of a step at batch 32: {best * 1e6:.0f} us")
    assert best < 1e-3
