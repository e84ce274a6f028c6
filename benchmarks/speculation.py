"""What drafts cost and bring: their memory, a step that verifies four of them, and whole requests.

    python -m benchmarks.speculation [--model NAME] [--dtype NAME] [--demo]

Steps follow one another as in an engine: all drafts of a step are accepted, so that the next one
replays as many. Requests are served by an engine whose drafts are never right, against one without
drafts, by turns; and by the demo's trained model (by that alone with --demo), with n-grams and with
its head: also with a head that drafts, and is never right.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.models import make_model
from benchmarks.results import Results, Target, add_device, arguments, parse, title
from benchmarks.timing import Times, interleave
from torch_hybrid import Engine, Runner, Sampling, Speculation, adapt, from_pretrained
from torch_hybrid.caches.pools import pool_cost
from torch_hybrid.caches.sizes import PoolSizes
from torch_hybrid.demo.serve import DRAFTS as HEAD_DRAFTS
from torch_hybrid.demo.task import checkpoint_path, make_prompts
from torch_hybrid.serving.request import Request
from torch_hybrid.serving.speculation.head import Head
from torch_hybrid.specs import DeltaRuleSpec

DRAFTS = 4
MEMORY, STEP, NEVER_RIGHT, HEAD = 1.08, 1.6, 1.03, 1 / 1.8
WRONG, NOT_ASKED = "a head that is never right", "its head, not asked"
QWEN3_NEXT = DeltaRuleSpec(
    num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128, conv_width=4
)


class Wrong:
    """Drafts that are never accepted: the token that came is not what comes next."""

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        return [[0] * count for count in counts]

    def forget(self, request: Request) -> None:
        pass


def memory() -> float:
    """What a sequence takes with drafts, over what it takes without, at Qwen3-Next's shapes."""

    def each(num_drafts: int) -> int:
        sizes = PoolSizes(
            num_pages=1,
            page_size=16,
            num_slots=1,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            num_drafts=num_drafts,
        )
        return pool_cost(QWEN3_NEXT, sizes).per_sequence

    return each(DRAFTS) / each(0)


def steps(runner: Runner, batch: int, rounds: int) -> dict[str, Times]:
    """A step of one token of each sequence, and one with drafts and as many replayed."""
    vocab, rng = runner.vocab_size, random.Random(batch)
    plain, drafted = runner.new_sequences(batch), runner.new_sequences(batch)
    for seqs in (plain, drafted):
        for seq in seqs:
            runner.extend([seq], [[rng.randrange(vocab) for _ in range(200)]])
    tokens = [rng.randrange(vocab) for _ in range(1 + DRAFTS)]

    def verify() -> None:
        logits = runner.verify(drafted, [tokens] * batch)
        runner.accept(drafted, [DRAFTS] * batch)
        logits[..., 0].tolist()  # which waits for them

    contestants = {
        "plain": lambda: runner.extend(plain, [tokens[:1]] * batch)[..., 0].tolist(),
        f"with {DRAFTS} drafts": verify,
    }
    times = interleave(contestants, rounds=rounds, warm_up=3)
    runner.free([*plain, *drafted])
    return times


def requests(runner: Runner, batch: int, rounds: int, num_tokens: int) -> dict[str, Times]:
    """Requests without drafts, and with drafts that are never right."""
    rng = random.Random(batch)
    prompts = [[rng.randrange(1, runner.vocab_size) for _ in range(64)] for _ in range(batch)]
    # Token 0, which is drafted, never comes.
    sampling = Sampling(max_new_tokens=num_tokens, ignore_eos=True, logit_bias={0: -1e9})
    speculating = Engine(runner, speculate=Speculation(Wrong(), num_drafts=DRAFTS))
    engines = {"without": Engine(runner), "never right": speculating}
    contestants = {
        name: lambda engine=engine: list(engine.generate(prompts, sampling))  # type: ignore[misc]
        for name, engine in engines.items()
    }
    times = interleave(contestants, rounds=rounds, warm_up=1)
    assert speculating.stats().drafts.accepted == 0 < speculating.stats().drafts.drafted
    return times


class WrongHead(Head):
    """A head that is asked for its drafts, and token 0 in their place, which the task does not
    have."""

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        return [[0] * len(own) for own in super().propose(requests, counts)]


def demo(rounds: int, num_tokens: int, device: str) -> dict[str, Times]:
    """The demo's trained model, one request after another: answers go round and round the symbols
    of their prompt, which n-grams find from the second round on. Its head is in no step of the
    runner that has no drafts of it."""
    sizes = {"max_seqs": 1, "max_tokens": 512, "kv_tokens": 4096, "max_drafts": DRAFTS}
    runner = Runner(from_pretrained(str(checkpoint_path()), device=device), **sizes)
    model = from_pretrained(str(checkpoint_path()), mtp=True, device=device)
    with_head = Runner(model, **sizes | {"max_drafts": HEAD_DRAFTS})
    prompts = [prompt.tokens for prompt in make_prompts(8, seed=0) if len(prompt.tokens) < 120]
    sampling = Sampling(max_new_tokens=num_tokens, ignore_eos=True)
    engines = {
        "without": Engine(runner),
        "n-grams": Engine(runner, speculate=Speculation("ngram", num_drafts=DRAFTS)),
        "its head": Engine(with_head, speculate=Speculation("mtp", num_drafts=HEAD_DRAFTS)),
        "its head, always as many": Engine(
            with_head, speculate=Speculation("mtp", num_drafts=HEAD_DRAFTS, adapts=False)
        ),
        NOT_ASKED: Engine(with_head),
        WRONG: Engine(
            with_head, speculate=Speculation(WrongHead(with_head), num_drafts=HEAD_DRAFTS)
        ),
    }
    served: dict[str, list[list[int]]] = {}

    def serve(name: str) -> None:
        served[name] = [output.tokens for output in engines[name].generate(prompts, sampling)]

    contestants = {name: partial(serve, name) for name in engines}
    times = interleave(contestants, rounds=rounds, warm_up=1)
    for name in list(engines)[1:]:
        assert served["without"] == served[name]
        drafts = engines[name].stats().drafts
        print(f"the demo's drafts, {name}: {drafts.accepted} of {drafts.drafted} accepted")
    return times


def of_the_model(options: argparse.Namespace, results: Results) -> None:
    """Memory, steps and requests of a model of random weights."""
    made = make_model(
        options.model, options.torch_dtype, quick=options.quick, device=options.device
    )
    model = adapt(made)
    runner = Runner(model, max_seqs=16, max_tokens=512, kv_tokens=32768, max_drafts=DRAFTS)
    ratio = memory()
    results.targets.append(Target(name="memory, Qwen3-Next", measured=ratio, limit=MEMORY))
    rounds = 5 if options.quick else 20
    for batch in (1, 8):
        plain, drafted = steps(runner, batch, rounds).values()
        ratio = drafted.over(plain)
        results.add("step", batch, plain.median * 1e3, drafted.median * 1e3, ratio)
        if batch == 1:
            results.targets.append(Target(name="step at batch 1", measured=ratio, limit=STEP))
    for batch in (1, 8):
        times = requests(runner, batch, 2 if options.quick else 3, 24 if options.quick else 128)
        without, wrong = times["without"], times["never right"]
        ratio = wrong.over(without)
        results.add("requests", batch, without.median * 1e3, wrong.median * 1e3, ratio)
        name = f"never right, batch {batch}"
        results.targets.append(Target(name=name, measured=ratio, limit=NEVER_RIGHT))


def main() -> None:
    parser = arguments(__doc__)
    add_device(parser)
    parser.add_argument("--demo", action="store_true", help="the demo's model alone")
    options = parse(parser)
    results = Results(
        title=title(options, "Drafts"),
        columns=("what", "batch", "ms", "drafts: ms", "ratio"),
    )
    if not options.demo:
        of_the_model(options, results)
    times = demo(2 if options.quick else 5, 64 if options.quick else 256, options.device)
    without = times.pop("without")
    for name, drafted in times.items():
        ratio = drafted.over(without)
        results.add(f"demo, {name}", 1, without.median * 1e3, drafted.median * 1e3, ratio)
        if limit := {"its head": HEAD, WRONG: NEVER_RIGHT}.get(name):
            results.targets.append(Target(name=f"demo, {name}", measured=ratio, limit=limit))
    ratio = times[WRONG].over(times[NOT_ASKED])
    name = f"the same, by {NOT_ASKED}"
    results.targets.append(Target(name=name, measured=ratio, limit=NEVER_RIGHT))
    results.emit(options)


if __name__ == "__main__":
    main()
