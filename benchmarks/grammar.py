"""What a grammar costs on steps of 32 sequences.

    python -m benchmarks.grammar [--model NAME] [--dtype NAME] [--device cuda]

The engine serves the same prompts with and without a grammar, by turns. All requests write an array
of JSON objects that does not end before their last token. The tokenizer is of the model's size,
trained on the sources of Python's own library. Time on a CPU is processor time of all threads:
those that make the masks count.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.models import make_model
from benchmarks.results import Results, Target, add_device, arguments, parse, title
from benchmarks.timing import Times
from torch_hybrid import Engine, Grammar, Runner, Sampling, adapt

BATCH, MOST = 32, 1.05
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "role": {"enum": ["reader", "writer", "owner"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 40}},
    },
    "required": ["name", "age", "role", "tags"],
    "additionalProperties": False,
}


def _many(items: dict[str, object]) -> Grammar:
    return Grammar.json_schema({"type": "array", "items": items, "minItems": 999})


GRAMMARS = {
    "schema": _many(_PERSON),
    "any objects": _many({"type": "object"}),
    "regex": Grammar.regex("([a-z]{2,9}[ ,]){999}"),
}


def train_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE, as most models have."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in library.rglob("*.py") if "site-packages" not in file.parts]
    model.train_from_iterator((file.read_text("utf-8", "ignore") for file in files), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>")


def by_turns(
    contestants: dict[str, Callable[[], object]], *, rounds: int, clock: Callable[[], float]
) -> dict[str, Times]:
    """Time contestants by turns, after one run of each."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(1 + rounds):
        for name, run in contestants.items():
            began = clock()
            run()
            if turn:
                seconds[name].append(clock() - began)
    return {name: Times(tuple(runs)) for name, runs in seconds.items()}


def main() -> None:
    """Serve with each grammar, and print the ratios."""
    parser = arguments(__doc__)
    add_device(parser)
    options = parse(parser)
    made = make_model(
        options.model, options.torch_dtype, quick=options.quick, device=options.device
    )
    runner = Runner(adapt(made), max_seqs=BATCH, max_tokens=512, kv_tokens=8192)
    tokenizer = train_tokenizer(runner.vocab_size)
    engine = Engine(runner, tokenizer, eos_token_ids=[0])
    prompts = [[1 + n, 2, 3, 4] for n in range(BATCH)]
    num_tokens = 16 if options.quick else 64

    def serve(grammar: Grammar | None) -> None:
        barred = {} if grammar is None else {"grammar": grammar}
        sampling = Sampling(max_new_tokens=num_tokens, ignore_eos=True, **barred)
        outputs = list(engine.generate(prompts, sampling))
        assert all(output.error is None for output in outputs)
        assert sum(len(output.tokens) for output in outputs) == BATCH * num_tokens

    contestants: dict[str, Callable[[], object]] = {"none": lambda: serve(None)}
    for name, grammar in GRAMMARS.items():
        contestants[name] = lambda grammar=grammar: serve(grammar)  # type: ignore[misc]
    on_cpu = options.device == "cpu"
    times = by_turns(
        contestants,
        rounds=3 if options.quick else 5,
        clock=time.process_time if on_cpu else time.perf_counter,
    )
    results = Results(
        title=title(options, f"Grammars, {BATCH} sequences, {len(tokenizer)} tokens"),
        columns=("grammar", "ms of a step", "ratio"),
    )
    for name, own in times.items():
        ratio = own.over(times["none"])
        results.add(name, own.median * 1e3 / num_tokens, ratio)
        if name != "none":
            results.targets.append(Target(name=name, measured=ratio, limit=MOST))
    results.emit(options)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
