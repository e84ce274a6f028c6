"""Serving 32 requests: our engine against transformers' generate with its best padded batch.

    python -m benchmarks.serve [--model NAME] [--dtype NAME]

Prompts of 16 to 1024 tokens, drawn once from a seed, and 64 new greedy tokens each. Transformers
gets left-padded batches of several sizes, in the order of arrival and sorted by length, and the
fastest of them counts. Its tokens with a batch of one, where nothing is padded, are the right
ones: ours are compared with them token by token. The floor is that of one prefill of all prompts
and of as many decode steps of all requests as there are new tokens.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.floor import Ceilings, measure, step_floor
from benchmarks.mixers import Row
from benchmarks.models import make_model
from benchmarks.oracle import Oracle
from benchmarks.results import Results, Target, arguments, parse, title
from benchmarks.timing import now
from torch_hybrid import Runner, adapt
from torch_hybrid.models.hybrid_model import HybridModel
from torch_hybrid.sampling import Sampling
from torch_hybrid.serving.engine import Engine

SPEEDUP = 3.0
Tokens = list[list[int]]


def make_prompts(count: int, vocab_size: int, *, longest: int) -> Tokens:
    """The same prompts at every call."""
    draw = random.Random(0)
    lengths = [draw.randint(16, longest) for _ in range(count)]
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]


def serve(engine: Engine, prompts: Tokens, num_new: int) -> Tokens:
    """All prompts at once through the engine."""
    sampling = Sampling(max_new_tokens=num_new, ignore_eos=True)
    outputs = sorted(engine.generate(prompts, sampling), key=lambda output: output.index)
    return [output.tokens for output in outputs]


def generate(model: Any, prompts: Tokens, num_new: int, *, batch: int, by_length: bool) -> Tokens:
    """All prompts through transformers' generate, so many at a time."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) if by_length else i)
    tokens: Tokens = [[] for _ in prompts]
    for first in range(0, len(order), batch):
        chosen = order[first : first + batch]
        longest = max(len(prompts[i]) for i in chosen)
        padding = [longest - len(prompts[i]) for i in chosen]
        ids = [[0] * n + prompts[i] for n, i in zip(padding, chosen, strict=True)]
        mask = [[0] * n + [1] * (longest - n) for n in padding]
        out = model.generate(
            input_ids=torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=num_new,
            do_sample=False,
            pad_token_id=0,
        )
        for i, row in zip(chosen, out[:, longest:].tolist(), strict=True):
            tokens[i] = row
    return tokens


def num_equal(tokens: Tokens, expected: Tokens) -> int:
    """How many tokens are right before the first wrong one of each request."""
    count = 0
    for row, right in zip(tokens, expected, strict=True):
        wrong = (i for i, pair in enumerate(zip(row, right, strict=True)) if pair[0] != pair[1])
        count += next(wrong, len(right))
    return count


def serving_floor(
    model: HybridModel, prompts: Tokens, num_new: int, ceilings: Ceilings
) -> tuple[float, float]:
    """Seconds that prefill and decode take at the least on this machine."""
    lengths = [len(prompt) for prompt in prompts]
    prefill = step_floor(model, [Row(n, 0) for n in lengths], ceilings)
    steps = ([Row(1, n + i) for n in lengths] for i in range(1, num_new))
    return prefill, sum(step_floor(model, rows, ceilings) for rows in steps)


def _timed(run: Callable[[], Tokens]) -> tuple[float, Tokens]:
    start = now()
    tokens = run()
    return now() - start, tokens


def _ways(batches: Sequence[int], count: int) -> list[tuple[str, int, bool]]:
    ways = []
    for batch in batches:
        ways.append((f"transformers, batch {batch}", batch, False))
        if 1 < batch < count:
            ways.append((f"transformers, batch {batch} by length", batch, True))
    return ways


def main() -> None:
    """Serve, compare, print."""
    parser = arguments("Serving against transformers' generate.")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--max-tokens", type=int, default=1024, help="of an engine's step")
    options = parse(parser)
    count, num_new = (4, 8) if options.quick else (options.requests, 64)
    longest = 64 if options.quick else 1024
    hf_model = make_model(options.model, options.torch_dtype, quick=options.quick)
    hf_model.generation_config.eos_token_id = None  # every request runs to its end
    model = adapt(copy.deepcopy(hf_model))
    prompts = make_prompts(count, model.vocab_size, longest=longest)
    runner = Runner(
        model,
        max_seqs=count,
        max_tokens=options.max_tokens,
        kv_tokens=count * (longest + num_new + 16),
    )
    seqs = runner.new_sequences(2)
    logits = torch.cat([runner.extend([s], [p]) for s, p in zip(seqs, prompts[:2], strict=True)])
    Oracle(hf_model).check("ours", logits, prompts[:2])
    runner.free(seqs)
    engine = Engine(runner)
    serve(engine, prompts[:2], 2)

    seconds: dict[str, float] = {}
    first, tokens = _timed(lambda: serve(engine, prompts, num_new))
    expected: Tokens | None = None
    for name, batch, by_length in _ways(options.batches, count):
        run = partial(generate, hf_model, prompts, num_new, batch=batch, by_length=by_length)
        seconds[name], made = _timed(run)
        if batch == 1:
            expected = made
    again, _ = _timed(lambda: serve(engine, prompts, num_new))
    ours, best = min(first, again), min(seconds, key=lambda name: seconds[name])

    results = Results(title=title(options, "Serving"), columns=["", "seconds", "new tokens/s"])
    total = count * num_new
    results.add("ours", ours, total / ours)
    for name, taken in seconds.items():
        results.add(name, taken, total / taken)
    if expected is not None:
        equal = num_equal(tokens, expected)
        results.notes.append(f"tokens equal to transformers': {equal} of {total}")
    results.notes.append(f"best padded batch: {best}; {sum(map(len, prompts))} prompt tokens")
    floors = serving_floor(model, prompts, num_new, measure(options.torch_dtype))
    results.notes.append(
        f"floor {sum(floors):.3g} s (prefill {floors[0]:.3g}, decode {floors[1]:.3g}): "
        f"ours takes {ours / sum(floors):.3g}x of it"
    )
    results.targets.append(
        Target(
            name="serving against the best padded batch",
            measured=seconds[best] / ours,
            limit=SPEEDUP,
            at_least=True,
        )
    )
    results.emit(options)


if __name__ == "__main__":
    main()
