"""Prefill of one prompt of 512 and of 2048 tokens, against the machine's multiply-adds.

    python -m benchmarks.prefill [--model NAME] [--dtype NAME] [--profile]

"multiply-adds" is as many as the step's FLOPs, in registers where none waits for another, taken by
turns with the others: no product is faster. "products by torch" replays the step's linear layers,
the same shapes with the same weights, and nothing else: what a library makes of them. Transformers
runs one forward without a cache, eagerly and compiled for this very length.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ceilings import Peak
from benchmarks.contestants import failure
from benchmarks.floor import Routing, called_modules, step_flops
from benchmarks.mixers import Row
from benchmarks.models import make_model
from benchmarks.oracle import Oracle
from benchmarks.profile_steps import print_profile
from benchmarks.results import Results, Target, arguments, parse, title
from benchmarks.timing import Times, interleave
from torch_hybrid import Runner, adapt
from torch_hybrid.layers.fused_experts import FusedExperts
from torch_hybrid.layers.head_linear import HeadLinear
from torch_hybrid.models.hybrid_model import HybridModel

OVER_MULTIPLY_ADDS = {torch.float32: 1.15, torch.bfloat16: 1.25}


def products_of(model: HybridModel, num_tokens: int) -> Callable[[], None]:
    """The linear layers of a prefill of one prompt, alone; its last token has logits."""
    head = model.hf_model.get_output_embeddings()
    calls: list[tuple[Tensor, Tensor]] = []
    by_head: list[tuple[Tensor, Tensor]] = []
    for module in called_modules(model):
        match module:
            case nn.Linear():
                rows = 1 if module is head else num_tokens
                calls.append((_rows(rows, module.weight), module.weight))
            case FusedExperts():
                routing = Routing.of(model, module)
                for weights in (module.gate_up_proj, module.down_proj):
                    for number, expert in enumerate(weights):
                        rows = routing.tokens_of(number, num_tokens)
                        calls.append((_rows(rows, expert), expert))
            case HeadLinear():
                heads, inputs, _ = module.weight.shape
                x = torch.ones(heads, num_tokens, inputs, dtype=module.weight.dtype)
                by_head.append((x, module.weight))

    def replay() -> None:
        with torch.inference_mode():
            for x, weight in calls:
                F.linear(x, weight)
            for x, weight in by_head:
                torch.bmm(x, weight)

    return replay


def _rows(count: int, weight: Tensor) -> Tensor:
    return torch.ones(count, weight.shape[1], dtype=weight.dtype)


def _extend(runner: Runner, prompt: Sequence[int]) -> Tensor:
    seqs = runner.new_sequences(1)
    logits = runner.extend(seqs, [prompt])
    runner.free(seqs)
    return logits


def _forward(call: Callable[..., Any], prompt: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        ids = torch.tensor([list(prompt)])
        logits: Tensor = call(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0]
    return logits


def _report(results: Results, length: int, times: dict[str, Times], limit: float) -> None:
    floor = times["multiply-adds"]
    for name, taken in times.items():
        results.add(length, name, taken.best * 1e3, taken.median * 1e3, taken.over(floor))
    ours = times["ours"]
    theirs = min(taken.best for name, taken in times.items() if "transformers" in name)
    name = f"prefill of {length}"
    results.targets += [
        Target(name=f"{name} over its multiply-adds", measured=ours.over(floor), limit=limit),
        Target(
            name=f"{name} against the better of transformers",
            measured=theirs / ours.best,
            limit=1.0,
            at_least=True,
        ),
    ]


def main() -> None:
    """Measure, then print."""
    parser = arguments("Prefill against its multiply-adds and against transformers.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile-limit", type=int, default=900, metavar="SECONDS",
                        help="for transformers under torch.compile; 0 leaves it out")  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="print where our time goes")
    options = parse(parser)
    hf_model = make_model(options.model, options.torch_dtype, quick=options.quick)
    model = adapt(copy.deepcopy(hf_model))
    longest = max(options.lengths)
    runner = Runner(model, max_seqs=4, max_tokens=longest, kv_tokens=2 * longest)
    oracle = Oracle(hf_model)
    results = Results(
        title=title(options, "Prefill"),
        columns=["tokens", "", "min ms", "median ms", "over multiply-adds"],
    )
    peak = Peak(options.torch_dtype)
    results.notes.append(f"multiply-adds of {peak.kind}")
    draw = random.Random(0)
    for length in options.lengths:
        prompt = [draw.randrange(model.vocab_size) for _ in range(length)]
        oracle.check("ours", _extend(runner, prompt), [prompt])
        runs = {
            "multiply-adds": partial(peak, step_flops(model, [Row(length, 0)])),
            "ours": partial(_extend, runner, prompt),
            "products by torch": products_of(model, length),
            "transformers eager": partial(_forward, hf_model, prompt),
        }
        if options.compile_limit:
            compiled = partial(_forward, torch.compile(hf_model, dynamic=False), prompt)
            if reason := failure(compiled, limit=options.compile_limit):
                results.notes.append(f"transformers compiled, {length} tokens: {reason}")
            else:
                runs["transformers compiled"] = compiled
        times = interleave(runs, rounds=options.rounds)
        _report(results, length, times, OVER_MULTIPLY_ADDS[options.torch_dtype])
        if options.profile:
            print_profile(f"prefill of {length}", runs["ours"])
    results.emit(options)


if __name__ == "__main__":
    main()
