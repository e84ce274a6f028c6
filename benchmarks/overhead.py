"""Host time of a step outside its graph: schedule, plan, refresh, and what follows.

    python -m benchmarks.overhead [--model NAME]

A model that computes nothing stands in for the real one, with the same layers and so the same
plans. What a step then takes is the host's work. Its vocabulary has two tokens, so that sampling
costs its Python and no reading of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import make_model
from benchmarks.results import Results, Target, arguments, parse, title
from benchmarks.timing import Times, now
from torch_hybrid import Runner, adapt
from torch_hybrid.backends.step import Step
from torch_hybrid.models.hybrid_model import HybridModel
from torch_hybrid.sampling import Sampling
from torch_hybrid.serving.engine import Engine

BATCH = 32
PROMPT = 200
MICROSECONDS = 300


class EmptyModel:
    """The layers of a model without what they compute: every logit is 0."""

    vocab_size = 2
    eos_token_ids = ()
    ranks = None
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, model: HybridModel) -> None:
        self.table = model.table
        self.num_position_axes = model.num_position_axes
        self._logits = torch.zeros(2 * BATCH, self.vocab_size)

    def __call__(self, tokens: Tensor, positions: Tensor, step: Step) -> Tensor:
        return tokens[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[: hidden.shape[0]]


def _times(run: Callable[[], Any], rounds: int) -> Times:
    seconds = []
    for _ in range(rounds + 10):
        start = now()
        run()
        seconds.append(now() - start)
    return Times(tuple(seconds[10:]))


def _engine(runner: Runner, rounds: int) -> Engine:
    """An engine whose requests are past their prompts."""
    engine = Engine(runner)
    for _ in range(BATCH):
        engine.submit([0] * PROMPT, Sampling(max_new_tokens=rounds + 50))
    for _ in range(BATCH * PROMPT // runner.max_tokens + 1):
        engine.step()
    return engine


def main() -> None:
    """Time steps by hand and through the engine."""
    parser = arguments("Host time of a step outside its graph.")
    parser.add_argument("--rounds", type=int, default=200)
    options = parse(parser)
    model = adapt(make_model(options.model, quick=True, num_hidden_layers=12))
    rounds = options.rounds
    runner = Runner(
        EmptyModel(model),
        max_seqs=BATCH,
        max_tokens=1024,
        kv_tokens=BATCH * (PROMPT + 3 * rounds + 200),
        compile=False,
    )
    seqs = runner.new_sequences(BATCH)
    for seq in seqs:
        runner.extend([seq], [[0] * PROMPT])
    decode = _times(lambda: runner.extend(seqs, [[1]] * BATCH), rounds)
    mixed = _times(lambda: runner.extend(seqs, [[1]] * (BATCH - 1) + [[1, 1]]), rounds)
    runner.free(seqs)
    engine = _engine(runner, rounds)
    step = _times(engine.step, rounds)
    engine.close()

    results = Results(
        title=title(options, f"Host time of a step of {BATCH}"), columns=["", "min us", "median us"]
    )
    results.add("Runner.extend, decode: check, plan, refresh", *_micro(decode))
    results.add("Runner.extend, mixed: check, plan, refresh", *_micro(mixed))
    results.add("Engine.step, decode: schedule, extend, sample", *_micro(step))
    results.targets.append(
        Target(
            name=f"host time of an engine's decode step of {BATCH}",
            measured=step.median * 1e6,
            limit=MICROSECONDS,
            unit=" us",
        )
    )
    results.emit(options)


def _micro(times: Times) -> tuple[float, float]:
    return times.best * 1e6, times.median * 1e6


if __name__ == "__main__":
    main()
