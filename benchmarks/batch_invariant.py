"""What it costs that each row has the bits that it has alone: decode steps, and prefill.

    python -m benchmarks.batch_invariant [--model NAME] [--dtype NAME] [--device cuda]

The same compiled steps of two runners on one model, by turns; sequences hold 60 tokens, so that
their prompts, which are slower the more alike their bits are to be, take no longer than the steps.
Before that the logits of a prompt are compared: alone and whole, and cut in the company of others.
"""

from __future__ import annotations

import random

import torch

from benchmarks.models import make_model
from benchmarks.results import Results, add_device, arguments, parse, title
from benchmarks.timing import Times, interleave
from torch_hybrid import Runner, adapt
from torch_hybrid.caches.sequence import Sequence

BATCHES, PREFILLS = (1, 8, 32), (64, 256)
CONTEXT = 60


def draw(length: int, vocab_size: int, seed: int) -> list[int]:
    """Tokens that no other seed has."""
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(length)]


def check(runner: Runner) -> None:
    """Raise unless a prompt has the same bits whole, and cut among others."""
    prompt = draw(150, runner.vocab_size, 1)
    alone, cut, other = runner.new_sequences(3)
    whole = runner.extend([alone], [prompt])
    runner.extend([other, cut], [draw(70, runner.vocab_size, 2), prompt[:83]])
    pieces = runner.extend([cut, other], [prompt[83:], [5]])
    runner.free([alone, cut, other])
    if not torch.equal(pieces[:1], whole):
        raise AssertionError("a prompt that was cut among others has other bits")


def step(runner: Runner, seqs: list[Sequence], tokens: list[list[int]]) -> None:
    """One step, until its logits are there."""
    runner.extend(seqs, tokens)[:, 0].tolist()


def decode(runners: dict[str, Runner], batch: int, rounds: int) -> dict[str, Times]:
    """Steps of one token of so many sequences."""
    steps = {}
    held = {name: runner.new_sequences(batch) for name, runner in runners.items()}
    for name, runner in runners.items():
        seqs = held[name]
        for first in range(0, batch, 8):
            some = seqs[first : first + 8]
            prompts = [draw(CONTEXT, runner.vocab_size, first + n) for n in range(len(some))]
            runner.extend(some, prompts)
        steps[name] = lambda runner=runner, seqs=seqs: step(runner, seqs, [[7]] * len(seqs))
    times = interleave(steps, rounds=rounds, warm_up=2)
    for name, runner in runners.items():
        runner.free(held[name])
    return times


def prefill(runners: dict[str, Runner], length: int, rounds: int) -> dict[str, Times]:
    """A prompt of so many tokens in one step."""

    def run(runner: Runner) -> None:
        (seq,) = runner.new_sequences(1)
        step(runner, [seq], [draw(length, runner.vocab_size, 3)])
        runner.free([seq])

    steps = {name: lambda runner=runner: run(runner) for name, runner in runners.items()}
    return interleave(steps, rounds=rounds, warm_up=1)


def add(results: Results, label: str, times: dict[str, Times]) -> None:
    ratio = times["invariant"].over(times["plain"])
    milliseconds = [1000 * times[name].median for name in ("plain", "invariant")]
    results.add(label, *milliseconds, ratio)


def main() -> None:
    parser = arguments(__doc__)
    add_device(parser)
    parser.add_argument("--prefills", type=int, nargs="+", default=PREFILLS, metavar="TOKENS")
    options = parse(parser)
    made = make_model(
        options.model, options.torch_dtype, quick=options.quick, device=options.device
    )
    model = adapt(made)
    sizes = {
        "max_seqs": max(BATCHES),
        "max_tokens": max(512, *options.prefills),
        "kv_tokens": 8192,
    }
    runners = {
        "plain": Runner(model, **sizes),
        "invariant": Runner(model, **sizes, batch_invariant=True),
    }
    check(runners["invariant"])
    results = Results(
        title=title(options, "Batch-invariant steps"),
        columns=("step", "plain: ms", "invariant: ms", "ratio"),
    )
    rounds = 3 if options.quick else 9
    for batch in BATCHES:
        add(results, f"decode, batch {batch}", decode(runners, batch, rounds))
    for length in options.prefills:
        add(results, f"prefill of {length}", prefill(runners, length, max(3, rounds // 3)))
    results.emit(options)


if __name__ == "__main__":
    main()
