"""Random requests over a real runner, with everything that goes wrong at random places.

Arrivals, cancels, deadlines, callbacks that raise, failures and Ctrl-C inside the model, sequences
held by others, two engines on one runner. After each round nothing may be held, and every request
must have the tokens that it gets when it is served alone.

    python -m tests.serving.fuzz --seconds 600 --seed 1
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from unittest import mock

import torch_hybrid as th
from tests.by_hand import options
from tests.tiny_models import VOCAB_SIZE, make_model

FAMILIES = {
    "qwen3_next": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "bailing_hybrid": {},
    "falcon_h1": {},
}
PROMPT_LENGTHS = [1, 2, 7, 33, 60]
SIZES = {"max_seqs": 4, "max_tokens": 48, "kv_tokens": 160, "page_size": 8, "compile": False}
DRAFTS = 3


class Planned(Exception):
    """What the fuzz raises on purpose."""


@dataclass(kw_only=True)
class Counts:
    """What came to pass."""

    rounds: int = 0
    requests: int = 0
    steps: int = 0
    raised: int = 0
    refused: int = 0
    by_reason: dict[str, int] = field(default_factory=dict)


class Fuzz:
    """One runner, and rounds of random requests on it."""

    def __init__(self, family: str, seed: int, **options: object) -> None:
        self.rng = random.Random(seed)
        model = self.make_model(family)
        self.asked: dict[th.Request, object] = {}  # prompts, images included
        self.runner = th.Runner(model, **{**SIZES, "max_drafts": DRAFTS, **options})
        self.alone = self.runner  # where a request is served by itself
        self.counts = Counts()
        self._calls_left: int | None = None  # until a layer raises
        model.layers[-1].register_forward_pre_hook(self._maybe_raise)

    def make_model(self, family: str) -> th.HybridModel:
        return th.adapt(make_model(family, **FAMILIES.get(family, {})))

    def monotonic(self) -> float:
        """The engines' clock: a step takes a second, on any machine."""
        return float(self.counts.steps)

    def round(self) -> None:
        """A few requests from arrival to end; raises AssertionError where one went wrong."""
        with mock.patch("torch_hybrid.serving.engine.time", self):
            requests = self._serve()
        self._check(requests)

    def _serve(self) -> list[tuple[th.Request, th.Sampling]]:
        """Requests with what they get when nothing goes wrong, each at its end."""
        rng = self.rng
        engines = [self.make_engine() for _ in range(rng.choice([1, 1, 2]))]
        held = self.runner.new_sequences(rng.choice([0, 0, 1]))
        to_come = rng.randint(1, 6)
        requests: list[tuple[th.Request, th.Sampling]] = []
        for _ in range(5000):
            if to_come and rng.random() < 0.5:
                to_come -= 1
                requests.append(self._submit(rng.choice(engines)))
            if requests and rng.random() < 0.02:
                self._cancel(engines, rng.choice(requests)[0])
            if rng.random() < 0.04:
                self._calls_left = rng.randint(0, 2)
            busy = [engine for engine in engines if engine.has_unfinished]
            if not busy and not to_come:
                break
            if busy:
                self._step(rng.choice(busy))
        else:
            raise AssertionError("a round does not come to an end")
        self._calls_left = None
        self.runner.free(held)
        return requests

    def make_engine(self) -> th.Engine:
        # Runs of one token come again often enough to be drafted.
        drafts = th.Speculation(
            th.Ngram(shortest=1), num_drafts=DRAFTS, adapts=self.rng.random() < 0.5
        )
        return th.Engine(
            self.runner,
            run_ahead=self.rng.choice(["off", "on"]),
            speculate=self.rng.choice([None, drafts]),
        )

    def draw_prompt(self) -> object:
        return [self.rng.randrange(VOCAB_SIZE) for _ in range(self.rng.choice(PROMPT_LENGTHS))]

    def _submit(self, engine: th.Engine) -> tuple[th.Request, th.Sampling]:
        rng = self.rng
        prompt = self.draw_prompt()
        plain = {
            "max_new_tokens": rng.randint(1, 12),
            "temperature": rng.choice([0.0, 0.8]),
            "seed": rng.randrange(100),
            "repetition_penalty": rng.choice([1.0, 1.0, 1.3]),
            "stop_token_ids": rng.sample(range(VOCAB_SIZE), 3),
        }
        raises = (
            {"logits_processor": _raises_after(rng.randint(0, 6))} if rng.random() < 0.2 else {}
        )
        timeout_s = rng.choice([None, None, None, 12.0])
        request = engine.submit(prompt, th.Sampling(**plain, **raises), timeout_s=timeout_s)
        self.asked[request] = prompt
        return request, th.Sampling(**plain)

    def _cancel(self, engines: list[th.Engine], request: th.Request) -> None:
        for engine in engines:
            if request in engine._scheduler:
                engine.cancel(request)

    def _step(self, engine: th.Engine) -> None:
        self.counts.steps += 1
        try:
            engine.step()
        except (Planned, KeyboardInterrupt):
            self.counts.raised += 1
        except th.CapacityError:  # the other engine, or ``held``, has what the oldest needs
            self.counts.refused += 1

    def _maybe_raise(self, *_: object) -> None:
        if self._calls_left is None:
            return
        self._calls_left -= 1
        if self._calls_left < 0:
            self._calls_left = None
            raise self.rng.choice([Planned("in the model"), KeyboardInterrupt()])

    def _check(self, requests: list[tuple[th.Request, th.Sampling]]) -> None:
        runner = self.runner
        assert runner.free_slots == runner.max_seqs, "a slot is lost"
        assert runner.free_pages == runner.cache.num_pages, "a page is lost"
        for request, plain in requests:
            output = request.output
            assert output is not None, "a request has no end"
            (alone,) = th.Engine(self.alone).generate(
                self.asked.pop(request, request.prompt), plain
            )
            got, expected = output.tokens, alone.tokens
            cut_short = output.finish_reason in ("cancelled", "timeout", "error")
            assert got == (expected[: len(got)] if cut_short else expected), (output, expected)
            reasons = self.counts.by_reason
            reasons[output.finish_reason] = reasons.get(output.finish_reason, 0) + 1
        self.counts.requests += len(requests)
        self.counts.rounds += 1


def _raises_after(num_calls: int):
    calls = 0

    def processor(tokens, logits):
        nonlocal calls
        calls += 1
        if calls > num_calls:
            raise ArithmeticError("on purpose")
        return logits

    return processor


def run(family: str, *, seed: int, seconds: float) -> Counts:
    """Rounds for so many seconds."""
    fuzz = Fuzz(family, seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        fuzz.round()
    return fuzz.counts


def main() -> None:
    args = options(__doc__, FAMILIES).parse_args()
    for family in args.families:
        print(family, run(family, seed=args.seed, seconds=args.seconds))


if __name__ == "__main__":
    main()
