"""Prompts that begin alike: what a prefix cache saves, and what it costs where nothing is shared.

    python -m benchmarks.prefix_cache [--model NAME] [--history TOKENS] [--shared TOKENS]
        [--device cuda]

A model of fewer and narrower layers than those of the other benchmarks, since thousands of tokens
are run again and again without the cache. A second turn is timed beside its new tokens alone, run
by hand on a sequence that holds the history already.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

from benchmarks.models import make_model
from benchmarks.results import Results, Target, add_device, arguments, parse, title
from benchmarks.timing import interleave, now
from torch_hybrid import Engine, PrefixCache, Runner, Sampling, adapt

LATER, SPEEDUP, COST = 1.05, 5.0, 1.02
EVERY = 1024
PARTS = ("second turn", "shifted", "shared", "strangers")
Tokens = list[int]


def draw(length: int, vocab_size: int, seed: int) -> Tokens:
    """Tokens that no other seed has."""
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(length)]


def serve(engine: Engine, prompts: Sequence[Tokens], num_new: int) -> list[int]:
    """Serve prompts together; how many tokens of each were kept."""
    sampling = Sampling(max_new_tokens=num_new, ignore_eos=True, temperature=0.0)
    outputs = sorted(engine.generate(prompts, sampling), key=lambda output: output.index)
    return [output.num_cached_tokens for output in outputs]


def second_turn(runner: Runner, results: Results, history: int, num_new: int, rounds: int) -> None:
    """A prompt of so many new tokens after a history that was run."""
    vocab_size, seeds = runner.vocab_size, count(1)
    first = draw(history, vocab_size, 0)
    with Engine(runner) as plain:
        for _ in range(1 + runner.captures):  # the first run captures steps
            start = now()
            serve(plain, [first + draw(num_new, vocab_size, next(seeds))], 1)
            cold = now() - start
    with Engine(runner, prefix_cache=True) as engine:
        serve(engine, [first], 1)
        (seq,) = runner.new_sequences(1)
        for begin in range(0, history, runner.max_tokens):
            runner.extend([seq], [first[begin : begin + runner.max_tokens]])
        handle = runner.snapshot(seq)
        runner.free([seq])

        def conversation() -> Tokens:  # whoever asks has it all, in both cases
            return first + draw(num_new, vocab_size, next(seeds))

        def alone() -> None:
            (fork,) = runner.new_sequences(1, start=handle)
            runner.extend([fork], [conversation()[history:]]).argmax(-1).tolist()
            runner.free([fork])

        def turn() -> None:
            (kept,) = serve(engine, [conversation()], 1)
            assert kept == history

        times = interleave({"alone": alone, "turn": turn}, rounds=rounds)
        runner.release(handle)
    results.add(f"{history} + {num_new} tokens, nothing kept", 1000 * cold, 0)
    results.add(f"{num_new} tokens alone", 1000 * times["alone"].median, history)
    results.add(f"{history} + {num_new} tokens, second turn", 1000 * times["turn"].median, history)
    ratio = times["turn"].over(times["alone"])
    results.targets.append(
        Target(name="second turn over its new tokens alone", measured=ratio, limit=LATER)
    )


def shifted(runner: Runner, results: Results, history: int) -> None:
    """A history in which one token more stands somewhere."""
    vocab_size = runner.vocab_size
    first = draw(history, vocab_size, 0)
    place = history * 5 // 8 + 100
    with Engine(runner, prefix_cache=PrefixCache(every=EVERY)) as engine:
        serve(engine, [first], 1)
        start = now()
        (kept,) = serve(engine, [[*first[:place], 7, *first[place:]]], 1)
        seconds = now() - start
    results.add(f"{history} tokens, one more at {place}", 1000 * seconds, kept)
    results.targets.append(
        Target(
            name=f"tokens run again before a shift, a snapshot every {EVERY}",
            measured=place - kept,
            limit=EVERY,
            unit="",
        )
    )


def shared(runner: Runner, results: Results, length: int, requests: int) -> None:
    """Requests that come together and begin with the same tokens."""
    vocab_size = runner.vocab_size
    begin = draw(length, vocab_size, 3)
    prompts = [begin + draw(64, vocab_size, 100 + n) for n in range(requests)]
    seconds = {}
    for name, keeps in (("nothing kept", False), ("prefixes kept", True)):
        for _ in range(1 + runner.captures):
            with Engine(runner, prefix_cache=keeps) as engine:
                start = now()
                kept = serve(engine, prompts, 16)
                seconds[name] = now() - start
        results.add(f"{requests} x ({length} shared + 64), {name}", 1000 * seconds[name], sum(kept))
    results.targets.append(
        Target(
            name="throughput of requests that share a prefix",
            measured=seconds["nothing kept"] / seconds["prefixes kept"],
            limit=SPEEDUP,
            at_least=True,
        )
    )


def strangers(runner: Runner, results: Results, requests: int, num_new: int, rounds: int) -> None:
    """Requests that share nothing."""
    vocab_size, seeds = runner.vocab_size, count(10_000)
    engines = {name: Engine(runner, prefix_cache=name == "kept") for name in ("plain", "kept")}

    def run(name: str) -> None:
        prompts = [draw(200, vocab_size, next(seeds)) for _ in range(requests)]
        assert not any(serve(engines[name], prompts, num_new))

    times = interleave({name: lambda name=name: run(name) for name in engines}, rounds=rounds)
    for engine in engines.values():
        engine.close()
    for name, text in (("plain", "nothing kept"), ("kept", "prefixes kept")):
        results.add(f"{requests} strangers of 200, {text}", 1000 * times[name].median, 0)
    results.targets.append(
        Target(
            name="cost where nothing is shared",
            measured=times["kept"].over(times["plain"]),
            limit=COST,
        )
    )


def main() -> None:
    """Run the parts that are asked for, print the table."""
    parser = arguments("What a prefix cache saves and costs.")
    add_device(parser)
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--history", type=int, default=8192, help="tokens of a first turn")
    parser.add_argument("--shared", type=int, default=4096, help="tokens that requests share")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    options = parse(parser)
    sizes = {"num_hidden_layers": options.layers, "hidden_size": options.hidden}
    history, length, requests, rounds = options.history, options.shared, 32, options.rounds
    if options.quick:
        history, length, requests, rounds = 2048, 256, 4, 1
    hf_model = make_model(
        options.model,
        options.torch_dtype,
        quick=options.quick,
        device=options.device,
        max_position_embeddings=2 * history,
        **({} if options.quick else sizes),
    )
    model = adapt(hf_model)
    tokens = max(4 * history, requests * (length + 128))
    runner = Runner(model, max_seqs=requests, kv_tokens=tokens, max_snapshots=64)
    runner.warm_up()
    results = Results(title=title(options, "Prefixes"), columns=["", "ms", "tokens kept"])
    parts = {
        "second turn": lambda: second_turn(runner, results, history, 256, rounds),
        "shifted": lambda: shifted(runner, results, history),
        "shared": lambda: shared(runner, results, length, requests),
        "strangers": lambda: strangers(runner, results, requests, 32, rounds),
    }
    for name in options.parts:
        parts[name]()
    results.emit(options)


if __name__ == "__main__":
    main()
