"""Random calls of engines and their runner from inside a step: from hooks of the model, rules on
logits, readers of events, drafters, checks of batches, signal handlers and the garbage collector;
and, while a step runs, from another thread.

What may be called there is done when the step ends, the rest is refused; and every request must
have the tokens that it gets alone, as in ``tests.serving.fuzz``, whose failures come as well.

    python -m tests.serving.fuzz_calls --seconds 600 --seed 1
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

import torch_hybrid as th
from tests.by_hand import options
from tests.serving.fuzz import DRAFTS, FAMILIES, Counts, Fuzz, Planned, _raises_after
from tests.tiny_models import VOCAB_SIZE

CALLERS = ("hook", "signal", "processor", "reader", "drafter", "check_batch")
CHANCE = 0.15  # of a caller to call
MOST = 12  # requests of a round


class Cell:
    """What only the cyclic collector frees."""

    def __init__(self, stream) -> None:
        self.itself, self.stream = self, stream


class CallingDrafter:
    """Drafts of n-grams, by a drafter that calls first."""

    def __init__(self, call) -> None:
        self._call, self._ngram = call, th.Ngram(shortest=1)

    def propose(self, requests, counts):
        self._call()
        return self._ngram.propose(requests, counts)

    def forget(self, request):
        self._call()
        self._ngram.forget(request)


class CallsFuzz(Fuzz):
    """Rounds of random requests, in whose steps everything is called again."""

    def __init__(self, family: str, seed: int, callers: tuple[str, ...] = CALLERS) -> None:
        self._callers, self._depth = callers, 0
        self.calls: dict[str, int] = {}
        self.wrong: list[str] = []  # told after the round: a rule's error ends its request alone
        self._engines: list[th.Engine] = []
        self._requests: list[tuple[th.Engine, th.Request, th.Sampling]] = []
        self._streams: list = []
        self._by_hand: list = []
        self._inside: dict[str, Callable[[], None]] = {
            "cancel": self._cancel_one,
            "submit": self._submit_more,
            "stats": self._stats,
            "collect": self._collect,
            "close": self._close_stream,
            "iterate": self._iterate,
            "free": self._free,
            "refused": self._refused,
        }
        check = partial(self._call, "check_batch")
        super().__init__(family, seed, max_snapshots=2, check_batch=lambda _: check())

    def round(self) -> None:
        self._engines, self._requests = [], []
        before = signal.signal(signal.SIGUSR1, lambda *_: self._call("signal"))
        try:
            super().round()
        finally:
            signal.signal(signal.SIGUSR1, before)

    def make_engine(self) -> th.Engine:
        rng = self.rng
        drafter = CallingDrafter(partial(self._call, "drafter"))
        drafts = th.Speculation(drafter, num_drafts=DRAFTS, adapts=rng.random() < 0.5)
        engine = th.Engine(
            self.runner,
            run_ahead=rng.choice(["off", "on"]),
            speculate=rng.choice([None, drafts]),
            prefix_cache=rng.choice([False, th.PrefixCache(min_tokens=8)]),
        )
        self._engines.append(engine)
        return engine

    def _serve(self):
        super()._serve()
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        self.runner.free(self._by_hand)
        self._by_hand.clear()
        for engine in self._engines:
            engine.close()
        assert not self.wrong, self.wrong
        return [(request, plain) for _, request, plain in self._requests]

    def _submit(self, engine: th.Engine):
        rng = self.rng
        plain = {
            "max_new_tokens": rng.randint(1, 12),
            "temperature": rng.choice([0.0, 0.8]),
            "seed": rng.randrange(100),
            "stop_token_ids": rng.sample(range(VOCAB_SIZE), 2),
        }
        rules, reader = {}, {}
        if "processor" in self._callers and rng.random() < 0.4:
            rules = {"logits_processor": self._processor(rng.choice([2, 100, 100]))}
        if "reader" in self._callers and rng.random() < 0.4:
            reader = {"on_event": self._reader(rng.choice([2, 100, 100]))}
        timeout_s = rng.choice([None, None, None, 12.0])
        sampling = th.Sampling(**plain, **rules)
        request = engine.submit(self.draw_prompt(), sampling, timeout_s=timeout_s, **reader)
        self._requests.append((engine, request, th.Sampling(**plain)))
        return request, th.Sampling(**plain)

    def _processor(self, num_calls: int):
        raises = _raises_after(num_calls)

        def processor(tokens, logits):
            self._call("processor")
            return raises(tokens, logits)

        return processor

    def _reader(self, num_calls: int):
        raises = _raises_after(num_calls)

        def on_event(event):
            self._call("reader")
            raises(None, None)

        return on_event

    def _step(self, engine: th.Engine) -> None:
        rng = self.rng
        if rng.random() < 0.2 and len(self._streams) < 2:
            sampling = th.Sampling(max_new_tokens=rng.randint(1, 30), ignore_eos=True)
            prompts = [self.draw_prompt() for _ in range(rng.randint(1, 2))]
            self._streams.append(rng.choice(self._engines).generate(prompts, sampling, stream=True))
        if rng.random() < 0.1 and self.runner.free_slots > 2:
            self._by_hand += self.runner.new_sequences(1)
        thread = self._thread() if rng.random() < 0.05 else None
        self._depth = 1
        try:
            if self._streams and rng.random() < 0.3:
                self._begin_stream()
            super()._step(engine)
        finally:
            self._depth = 0
            if thread is not None:
                thread.join()

    def _begin_stream(self) -> None:
        """Take one event of a stream, which runs steps."""
        try:
            next(self._streams[-1], None)
        except (Planned, KeyboardInterrupt, th.CapacityError):
            self.counts.raised += 1

    def _thread(self) -> threading.Thread:
        """Call from another thread, while this one steps."""
        engine, stream = self.rng.choice(self._engines), None
        if self._streams and self.rng.random() < 0.5:
            stream = self._streams.pop()
        victims = [(e, r) for e, r, _ in self._requests if r.output is None][:1]

        def call() -> None:
            nonlocal stream
            engine.stats()
            for owner, request in victims:
                owner.cancel(request)
            if stream is not None:
                cell, stream = Cell(stream), None
                del cell
                gc.collect(0)

        def told() -> None:
            try:
                call()
            except Exception as error:
                self.wrong.append(f"another thread got {error!r}")

        thread = threading.Thread(target=told)
        thread.start()
        return thread

    def _maybe_raise(self, *args: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._call("hook")
            if self._depth and self.rng.random() < CHANCE and "signal" in self._callers:
                signal.raise_signal(signal.SIGUSR1)
        super()._maybe_raise(*args)

    # What is called from inside.

    def _call(self, caller: str) -> None:
        rng = self.rng
        if self._depth != 1 or caller not in self._callers or rng.random() > CHANCE:
            return
        self._depth = 2
        name, call = rng.choice(list(self._inside.items()))
        try:
            call()
            self.calls[f"{caller}: {name}"] = self.calls.get(f"{caller}: {name}", 0) + 1
        except (Exception, pytest.fail.Exception) as error:
            self.wrong.append(f"{name} from {caller}: {error!r}")
        finally:
            self._depth = 1

    def _cancel_one(self) -> None:
        left = [(engine, r) for engine, r, _ in self._requests if r.output is None]
        if left:
            engine, request = self.rng.choice(left)
            engine.cancel(request)
            assert request.output is None, "a request ended in the midst of a step"

    def _submit_more(self) -> None:
        if len(self._requests) < MOST:
            self._submit(self.rng.choice(self._engines))

    def _stats(self) -> None:
        assert self.rng.choice(self._engines).stats().num_running <= self.runner.max_seqs

    def _collect(self) -> None:
        if self._streams:
            cell = Cell(self._streams.pop(0))
            del cell
            gc.collect(0)

    def _close_stream(self) -> None:
        if self._streams:
            self._streams.pop(0).close()

    def _iterate(self) -> None:
        if self._streams:
            with suppress(RuntimeError):  # but for events that are there already
                next(self._streams[0], None)

    def _free(self) -> None:
        if self._by_hand:
            self.runner.free([self._by_hand.pop()])

    def _refused(self) -> None:
        engine, runner = self.rng.choice(self._engines), self.runner
        refused: dict[str, Callable[[], object]] = {
            "Engine.step": engine.step,
            "Engine.close": engine.close,
            "Runner.new_sequences": partial(runner.new_sequences, 1),
            "Runner.extend": partial(runner.extend, [], []),
            "Runner.update_weights": partial(runner.update_weights, {}),
        }
        name = self.rng.choice(list(refused))
        with pytest.raises(RuntimeError, match=f"{name} was called inside"):
            refused[name]()


def run(family: str, *, seed: int, seconds: float, callers: tuple[str, ...] = CALLERS) -> Counts:
    """Rounds for so many seconds."""
    fuzz = CallsFuzz(family, seed, callers)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        fuzz.round()
    print(dict(sorted(fuzz.calls.items())))
    return fuzz.counts


def main() -> None:
    parser = options(__doc__, FAMILIES)
    parser.add_argument("--callers", nargs="+", choices=CALLERS, default=list(CALLERS))
    args = parser.parse_args()
    for family in args.families:
        callers = tuple(args.callers)
        print(family, run(family, seed=args.seed, seconds=args.seconds, callers=callers))


if __name__ == "__main__":
    main()
