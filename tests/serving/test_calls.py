"""Calls of an engine and its runner from inside a step: done at its end, or refused."""

import asyncio
import gc
import queue
import signal
import threading

import pytest

import torch_hybrid as th
from tests.serving.fake_runner import FakeRunner, alone
from tests.serving.fuzz import FAMILIES
from tests.serving.fuzz_calls import CallsFuzz, Cell
from tests.tiny_models import make_model

SMALL = {"max_seqs": 4, "max_tokens": 64, "kv_tokens": 256, "page_size": 8, "compile": False}
SAMPLING = th.Sampling(max_new_tokens=8, ignore_eos=True)
PROMPTS = [[5, 6, 7] * 4, [9, 8], [100, 3, 4]]


@pytest.fixture(scope="module")
def model():
    return th.adapt(make_model("qwen3_next", **FAMILIES["qwen3_next"]))


@pytest.fixture(scope="module")
def expected(model):
    return tokens_of(th.Engine(th.Runner(model, **SMALL)))


@pytest.fixture
def runner(model):
    return th.Runner(model, **SMALL, max_snapshots=2, max_drafts=2)


class Inside:
    """Calls something once, in the next step but ``after``; keeps what came of it."""

    def __init__(self, model):
        self._handle = model.layers[-1].register_forward_pre_hook(self)
        self.call, self.after, self.got = None, 0, None

    def __call__(self, *_):
        self.after -= 1
        if self.call is not None and self.after < 0:
            call, self.call = self.call, None
            try:
                self.got = call()
            except RuntimeError as error:
                self.got = error

    def remove(self):
        self._handle.remove()


@pytest.fixture
def inside(model):
    inside = Inside(model)
    yield inside
    inside.remove()


def tokens_of(engine):
    outputs = sorted(engine.generate(PROMPTS, SAMPLING), key=lambda output: output.index)
    return [output.tokens for output in outputs]


def assert_all_returned(runner):
    assert runner.free_slots == SMALL["max_seqs"]
    assert runner.free_pages == SMALL["kv_tokens"] // SMALL["page_size"]


@pytest.mark.parametrize("family", FAMILIES)
def test_random_calls_from_everywhere(family):
    fuzz = CallsFuzz(family, seed=0)
    for _ in range(10):
        fuzz.round()
    assert fuzz.counts.requests > 20
    assert len(fuzz.calls) > 20


@pytest.mark.parametrize("after", [0, 2, 5])
def test_a_stream_is_collected_in_the_step_of_others(runner, inside, expected, after):
    engine = th.Engine(runner)
    cell = Cell(engine.generate([[7, 7, 7]], th.Sampling(max_new_tokens=40), stream=True))
    next(cell.stream)
    del cell
    inside.after, inside.call = after, gc.collect
    assert tokens_of(engine) == expected
    assert inside.call is None
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    assert_all_returned(runner)


def test_a_stream_of_another_engine_is_collected(runner, inside, expected):
    engines = [th.Engine(runner), th.Engine(runner, prefix_cache=th.PrefixCache(min_tokens=2))]
    cell = Cell(engines[1].generate([[7, 7, 7]], th.Sampling(max_new_tokens=40), stream=True))
    next(cell.stream)
    del cell
    inside.call = gc.collect
    assert tokens_of(engines[0]) == expected
    assert not engines[1].has_unfinished
    engines[1].close()
    assert_all_returned(runner)


REFUSED = {
    "Engine.step": lambda engine, seqs: engine.step(),
    "Engine.close": lambda engine, seqs: engine.close(),
    "Engine.save_prefixes": lambda engine, seqs: engine.save_prefixes("unwritten"),
    "Engine.load_prefixes": lambda engine, seqs: engine.load_prefixes("unread"),
    "the iteration of Engine.generate": lambda engine, seqs: next(engine.generate([1])),
    "Runner.new_sequences": lambda engine, seqs: engine.runner.new_sequences(1),
    "Runner.extend": lambda engine, seqs: engine.runner.extend(seqs, [[1]]),
    "Runner.launch": lambda engine, seqs: engine.runner.launch(seqs, [[1]], [None]),
    "Runner.verify": lambda engine, seqs: engine.runner.verify(seqs, [[1, 2]]),
    "Runner.accept": lambda engine, seqs: engine.runner.accept(seqs, [0]),
    "Runner.draft": lambda engine, seqs: engine.runner.draft(seqs, [1], [1]),
    "Runner.flush": lambda engine, seqs: engine.runner.flush(seqs),
    "Runner.snapshot": lambda engine, seqs: engine.runner.snapshot(seqs[0]),
    "Runner.warm_up": lambda engine, seqs: engine.runner.warm_up(),
    "Runner.update_weights": lambda engine, seqs: engine.runner.update_weights({}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_who_asked_and_where(runner, inside, expected, name):
    engine, seqs = th.Engine(runner), runner.new_sequences(1)
    runner.extend(seqs, [[3]])
    inside.call = lambda: REFUSED[name](engine, seqs)
    assert tokens_of(engine) == expected
    assert f"{name} was called inside Engine.step of the same runner" in str(inside.got)
    assert runner.length(seqs[0]) == 1
    runner.free(seqs)
    assert_all_returned(runner)


def test_a_runner_by_hand_refuses_as_well(runner, inside):
    (seq,) = runner.new_sequences(1)
    expected = runner.extend([seq], [[3, 4, 5]])
    runner.free([seq])
    (seq,) = runner.new_sequences(1)
    inside.call = lambda: runner.extend([seq], [[9]])
    assert runner.extend([seq], [[3, 4, 5]]).equal(expected)
    assert "Runner.extend was called inside Runner.extend of the same runner" in str(inside.got)
    assert runner.length(seq) == 3


def test_free_and_release_are_done_when_the_call_ends(runner, inside, expected):
    seqs = runner.new_sequences(2)
    runner.extend(seqs, [[3], [4]])
    handle = runner.snapshot(seqs[0])

    def give_back():
        runner.free(seqs)
        runner.free(seqs[1:])
        runner.release(handle)
        return runner.free_slots

    inside.call = give_back
    assert tokens_of(th.Engine(runner)) == expected
    assert inside.got < SMALL["max_seqs"] - 1
    assert runner.free_snapshots == 2
    assert_all_returned(runner)
    with pytest.raises(ValueError, match="was freed"):
        runner.free(seqs)


def test_sequences_are_freed_by_a_finalizer_in_their_own_step(runner, inside):
    seqs = runner.new_sequences(1)
    inside.call = lambda: runner.free(seqs)
    assert runner.extend(seqs, [[3, 4]]).shape[0] == 1
    assert_all_returned(runner)


def test_requests_are_cancelled_and_submitted_when_the_step_ends(runner, inside, expected):
    engine = th.Engine(runner, max_waiting=3)
    first, second, third = [engine.submit(prompt, SAMPLING) for prompt in PROMPTS]

    def change():
        before = engine.stats()
        engine.cancel(second)
        fourth = engine.submit(PROMPTS[1], SAMPLING, timeout_s=1e6)
        fifth = engine.submit([1], SAMPLING)
        engine.cancel(fifth)
        assert engine.stats() == before
        assert second.output is fourth.output is fifth.output is None
        return fourth, fifth

    inside.after, inside.call = 1, change
    engine.step()
    engine.step()
    fourth, fifth = inside.got
    assert len(second.output.tokens) == 2
    assert second.output.finish_reason == fifth.output.finish_reason == "cancelled"
    while engine.has_unfinished:
        engine.step()
    assert [r.output.tokens for r in (first, fourth, third)] == expected
    assert_all_returned(runner)


def test_max_waiting_counts_what_was_submitted_in_the_step():
    engine = th.Engine(FakeRunner(), max_waiting=2)

    def on_event(event):
        if len(event.request.tokens) == 1:
            engine.submit([2])
            engine.submit([3])
            engine.submit([4])

    request = engine.submit([1], on_event=on_event)
    engine.step()
    assert "2 requests wait already and 1 more came" in request.output.error
    assert engine.stats().num_waiting == 2


def test_a_stream_is_closed_in_its_own_step(runner, inside):
    engine = th.Engine(runner)
    stream = engine.generate(PROMPTS, SAMPLING, stream=True)
    next(stream)
    inside.call = stream.close
    assert len(list(stream)) <= 2  # which the first step brought
    assert not engine.has_unfinished
    assert_all_returned(runner)


def test_a_stream_goes_on_after_it_was_refused_a_step(runner, inside, expected):
    engine = th.Engine(runner)
    stream = engine.generate(PROMPTS[0], SAMPLING)
    inside.call = lambda: next(stream)
    assert tokens_of(engine) == expected
    assert "the iteration of Engine.generate was called inside" in str(inside.got)
    assert next(stream).tokens == expected[0]
    assert list(stream) == []


def test_rules_that_call_the_engine_end_their_own_request(runner, expected):
    engine = th.Engine(runner)

    def steps(tokens, logits):
        engine.step()
        return logits

    own = th.Sampling(max_new_tokens=8, logits_processor=steps)
    outputs = list(engine.generate([*PROMPTS, [1]], [SAMPLING] * 3 + [own]))
    by_index = {output.index: output for output in outputs}
    assert "Engine.step was called inside Engine.step" in by_index[3].error
    assert [by_index[i].tokens for i in range(3)] == expected


def test_a_signal_handler_cancels(runner, inside, expected):
    engine = th.Engine(runner)
    before = signal.signal(signal.SIGUSR1, lambda *_: engine.cancel(extra))
    try:
        extra = engine.submit([1, 2, 3], SAMPLING)
        inside.after, inside.call = 1, lambda: signal.raise_signal(signal.SIGUSR1)
        assert tokens_of(engine) == expected
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert extra.output.finish_reason == "cancelled"
    assert_all_returned(runner)


def test_other_threads_wait_and_their_finalizers_do_not(runner, inside, expected):
    engine, log = th.Engine(runner), []
    extra = engine.submit([1, 2, 3], SAMPLING)
    cell = Cell(engine.generate([[7, 7, 7]], SAMPLING, stream=True))
    next(cell.stream)

    def cancel():
        engine.cancel(extra)
        log.append(extra.output.finish_reason)

    def collect():
        nonlocal cell
        del cell
        gc.collect()

    def in_step():
        threads = [threading.Thread(target=cancel), threading.Thread(target=collect)]
        for thread in threads:
            thread.start()
        threads[1].join()
        threads[0].join(timeout=0.05)
        log.append("the step goes on")
        return threads[0]

    inside.call = in_step
    assert tokens_of(engine) == expected
    inside.got.join()
    assert log == ["the step goes on", "cancelled"]
    assert_all_returned(runner)


class Interrupted:
    """A tokenizer that Ctrl-C meets as it is called the first time."""

    def __init__(self):
        self.is_met = False

    def decode(self, tokens, **_):
        if not self.is_met:
            self.is_met = True
            raise KeyboardInterrupt
        return "text"


@pytest.mark.parametrize("where", ["before its end", "after its end"])
def test_a_cancel_that_ctrl_c_cuts_off_is_done_and_loses_nothing(runner, expected, where):
    def on_event(event):
        if event.output is not None and where == "after its end":
            raise KeyboardInterrupt

    tokenizer = Interrupted() if where == "before its end" else None
    engine = th.Engine(runner, tokenizer)
    extra = engine.submit([1, 2] * 6, SAMPLING, on_event=on_event)
    others = [engine.submit(prompt, SAMPLING) for prompt in PROMPTS]
    engine.step()
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.cancel(extra)
    run_all(engine)
    assert extra.output.finish_reason == "cancelled"
    assert len(extra.output.tokens) == 2
    assert [request.output.tokens for request in others] == expected
    assert_all_returned(runner)


# Who reads the events of a request that was submitted.


def test_a_reader_gets_every_event_and_a_thread_waits_for_it_without_polling():
    engine, events = th.Engine(FakeRunner()), queue.SimpleQueue()
    request = engine.submit([1, 2], th.Sampling(max_new_tokens=6), on_event=events.put)
    got = []

    def read():
        while not got or got[-1].output is None:
            got.append(events.get())

    reader = threading.Thread(target=read)
    reader.start()
    while engine.has_unfinished:
        engine.step()
    reader.join()
    assert [event.token for event in got] == alone([1, 2], th.Sampling(max_new_tokens=6))
    assert got[-1].output is request.output


@pytest.mark.parametrize("num_calls", [0, 3, 5])
def test_a_reader_that_raises_ends_its_request_alone(num_calls):
    engine, calls = th.Engine(FakeRunner()), []

    def on_event(event):
        calls.append(event)
        if len(calls) > num_calls:
            raise ArithmeticError("on purpose")

    sampling = th.Sampling(max_new_tokens=6)
    request = engine.submit([1, 2], sampling, on_event=on_event)
    other = engine.submit([3], sampling)
    events = []
    while engine.has_unfinished:
        events += engine.step()
    assert len(calls) == num_calls + 1
    assert request.output.error == "on_event raised ArithmeticError: on purpose"
    assert request.output.tokens == alone([1, 2], sampling)[: num_calls + 1]
    assert [event.output for event in events if event.request is request][-1] is request.output
    assert other.output.tokens == alone([3], sampling)


def test_an_event_loop_reads_what_another_thread_serves():
    engine, sampling = th.Engine(FakeRunner()), th.Sampling(max_new_tokens=6, n=2)

    async def serve():
        events = asyncio.Queue()
        first = engine.submit([1, 2], sampling, queue=events)
        stepping = asyncio.create_task(asyncio.to_thread(run_all, engine))
        while any(request.output is None for request in first.samples) or not events.empty():
            event = await events.get()
            assert threading.current_thread() is threading.main_thread()
            got[event.request.sample].append(event.token)
        await stepping

    got = [[], []]
    asyncio.run(serve())
    assert got == [alone([1, 2], th.Sampling(max_new_tokens=6))] * 2


def run_all(engine):
    while engine.has_unfinished:
        engine.step()


def test_readers_that_cannot_be():
    engine = th.Engine(FakeRunner())
    with pytest.raises(TypeError, match="on_event must be a callable or None, got 3"):
        engine.submit([1], on_event=3)
    with pytest.raises(TypeError, match=r"queue must be an asyncio\.Queue or None"):
        engine.submit([1], queue=queue.Queue())
    with pytest.raises(ValueError, match="queue must be unbounded, got maxsize=2"):
        engine.submit([1], queue=asyncio.Queue(2))
    with pytest.raises(ValueError, match="runs where submit is called, and none does"):
        engine.submit([1], queue=asyncio.Queue())
    with pytest.raises(ValueError, match="events have one reader, got on_event and queue"):
        engine.submit([1], on_event=print, queue=asyncio.Queue())
    assert not engine.has_unfinished


def test_a_reader_whose_event_loop_has_ended_ends_its_request():
    engine = th.Engine(FakeRunner())

    async def submit():
        return engine.submit([1], queue=asyncio.Queue())

    request = asyncio.run(submit())
    run_all(engine)
    assert "on_event raised RuntimeError: Event loop is closed" in request.output.error
