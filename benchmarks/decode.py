"""A decode step at batch 1, 8 and 32, against its floor and against transformers.

    python -m benchmarks.decode [--model NAME] [--dtype NAME] [--profile]

Every contestant holds the same sequences, of 128 to 512 tokens, and appends a token to each by
turns; between them, as many bytes of the weights are read as the step must move, which is the
floor of memory.
Transformers runs its padded batch eagerly, and compiled with a static cache. Targets hold
for dense models in float32; for others the figures are reported.
"""

from __future__ import annotations

import argparse
import copy
import random
from functools import partial

import torch

from benchmarks.contestants import Decoder, Ours, Transformers, failure, load_adapters, transformers
from benchmarks.floor import Read, measure, step_bytes, step_flops
from benchmarks.mixers import Row
from benchmarks.models import make_model
from benchmarks.oracle import Oracle
from benchmarks.profile_steps import print_profile
from benchmarks.results import Results, Target, arguments, parse, title
from benchmarks.timing import Times, interleave
from torch_hybrid import Runner, adapt
from torch_hybrid.models.hybrid_model import HybridModel

FLOOR_LIMITS = {1: 1.5, 8: 2.0}
SPEEDUPS = {1: 1.6, 8: 1.5, 32: 1.5}
NUM_CHECKED = 4  # sequences of a batch whose logits are compared


def _prompts(batch: int, vocab_size: int, *, quick: bool) -> list[list[int]]:
    draw = random.Random(batch)
    shortest, longest = (16, 48) if quick else (128, 512)
    lengths = [draw.randint(shortest, longest) for _ in range(batch)]
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]


def _line_up(
    contestants: dict[str, Decoder], prompts: list[list[int]], oracle: Oracle, limit: int
) -> dict[str, Decoder]:
    """Start everyone and check a step of each; who cannot compile is left out with a notice."""
    ready = {}
    tokens = [1] * len(prompts)
    sequences = [[*prompt, 1] for prompt in prompts][:NUM_CHECKED]
    for name, contestant in contestants.items():
        begin = partial(_begin, contestant, prompts, tokens)
        if name == "transformers compiled":
            if reason := failure(begin, limit=limit):
                print(f"{name} is left out at batch {len(prompts)}: {reason}")
                continue
        else:
            oracle.check(name, begin()[:NUM_CHECKED], sequences)
        ready[name] = contestant
    return ready


def _begin(contestant: Decoder, prompts: list[list[int]], tokens: list[int]) -> torch.Tensor:
    contestant.start(prompts)
    return contestant.step(tokens)


def _report(
    results: Results,
    batch: int,
    times: dict[str, Times],
    memory: Times,
    matrix_seconds: float,
    *,
    has_targets: bool,
) -> None:
    for name, taken in [*times.items(), ("floor: memory", memory)]:
        over = taken.over(memory, least=matrix_seconds)
        results.add(batch, name, taken.best * 1e3, taken.median * 1e3, over, batch / taken.median)
    if matrix_seconds > memory.median:
        results.notes.append(f"floor of batch {batch}: {matrix_seconds * 1e3:.3g} ms of products")
    over = times["ours compiled"].over(memory, least=matrix_seconds)
    ours = times["ours compiled"].median
    theirs = min(taken.median for name, taken in times.items() if "transformers" in name)
    if has_targets and batch in FLOOR_LIMITS:
        limit = FLOOR_LIMITS[batch]
        results.targets.append(
            Target(name=f"decode batch {batch} over floor", measured=over, limit=limit)
        )
    results.targets.append(
        Target(
            name=f"decode batch {batch} against the better of transformers",
            measured=theirs / ours,
            limit=SPEEDUPS[batch],
            at_least=True,
        )
    )


def _contestants(
    options: argparse.Namespace, hf_model: object, model: HybridModel, max_len: int
) -> dict[str, Decoder]:
    def runner(compile: bool, **more: int) -> Runner:
        most = max(options.batches)
        sizes = {"max_seqs": most, "max_tokens": 512, "kv_tokens": most * (max_len + 16)}
        return Runner(model, **sizes, compile=compile, **more)

    contestants: dict[str, Decoder] = {
        "ours compiled": Ours(runner(compile=True)),
        "ours eager": Ours(runner(compile=False)),
        "transformers eager": transformers(hf_model),
    }
    if count := options.adapters:
        experts = options.expert_adapters
        sizes = {"max_adapters": count, "max_lora_rank": 16, "expert_adapters": experts}
        adapted = runner(compile=True, **sizes)
        load_adapters(adapted, hf_model, count, rank=16, experts=experts)
        contestants[f"ours compiled, {count} adapters"] = Ours(adapted)
    if options.compile_limit and isinstance(contestants["transformers eager"], Transformers):
        contestants["transformers compiled"] = Transformers(hf_model, max_len=max_len)
    return contestants


def main() -> None:
    """Measure, then print."""
    parser = arguments("Decode steps against their floor and against transformers.")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], choices=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile-limit", type=int, default=900, metavar="SECONDS",
                        help="for transformers under torch.compile; 0 leaves it out")  # fmt: skip
    parser.add_argument(
        "--adapters",
        type=int,
        default=0,
        metavar="COUNT",
        help="also steps whose sequences have so many, of rank 16, in turn",
    )
    parser.add_argument("--expert-adapters", action="store_true", help="of experts too")
    parser.add_argument("--profile", action="store_true", help="print where our time goes")
    options = parse(parser)
    torch._dynamo.config.recompile_limit = 64
    hf_model = make_model(options.model, options.torch_dtype, quick=options.quick)
    model = adapt(copy.deepcopy(hf_model))
    oracle = Oracle(hf_model)
    max_len = 512 + options.rounds + 16
    contestants = _contestants(options, hf_model, model, max_len)
    has_targets = options.dtype == "float32" and not options.model.endswith("_moe")
    results = Results(
        title=title(options, "Decode"),
        columns=["batch", "", "min ms", "median ms", "over floor", "tokens/s"],
    )
    flop_rate = measure(options.torch_dtype).flop_rate
    read = Read(model.parameters())
    for batch in options.batches:
        prompts = _prompts(batch, model.vocab_size, quick=options.quick)
        ready = _line_up(contestants, prompts, oracle, options.compile_limit)
        runs = {name: partial(c.step, [1] * batch) for name, c in ready.items()}
        rows = [Row(1, len(prompt)) for prompt in prompts]
        reading = {"memory": partial(read, step_bytes(model, rows))}
        times = interleave(reading | runs, rounds=options.rounds)
        memory, matrix_seconds = times.pop("memory"), step_flops(model, rows) / flop_rate
        _report(results, batch, times, memory, matrix_seconds, has_targets=has_targets)
        if options.profile:
            for name, run in runs.items():
                if name.startswith("ours compiled"):
                    print_profile(f"decode batch {batch}, {name}", run)
    results.emit(options)


if __name__ == "__main__":
    main()
