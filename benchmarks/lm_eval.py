"""Requests of lm-evaluation-harness: its model ``torch-hybrid`` beside its own ``hf``.

    python -m benchmarks.lm_eval [--model NAME] [--requests N] [--batch N] [--rounds N]

Both models answer the same log-likelihoods and contexts by turns, ``hf`` in batches of ``--batch``
and ours with as many sequences. Before a time is printed, our answers are compared with those of
``hf`` one by one: in batches, padding changes some of its own texts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from benchmarks.grammar import train_tokenizer
from benchmarks.models import make_model
from benchmarks.results import Results, arguments, parse, title
from benchmarks.timing import interleave
from torch_hybrid.lm_eval import HybridLM

WORDS = ["a", "model", "answers", "the", "harness", "with", "every", "token", "it", "has", "read"]
NEW = 16  # tokens of a generated answer


def text(seed: int, num_words: int) -> str:
    """Words in an order of their own for each seed."""
    return " ".join(WORDS[(seed * 7 + n * n + n) % len(WORDS)] for n in range(num_words))


def make_requests(num: int) -> dict[str, list[Instance]]:
    """Requests by kind; contexts have 20 to 80 words."""
    contexts = [text(seed, 20 + seed * 13 % 61) for seed in range(num)]
    until = {"until": ["\n"], "max_gen_toks": NEW, "do_sample": False}
    pairs: dict[str, list[tuple[Any, ...]]] = {
        "loglikelihood": [(each, " " + text(n, 3)) for n, each in enumerate(contexts)],
        "generate_until": [(each, dict(until)) for each in contexts],
    }
    return {
        kind: [Instance(kind, {}, each, n) for n, each in enumerate(given)]  # type: ignore[arg-type]
        for kind, given in pairs.items()
    }


def check(kind: str, ours: list[Any], theirs: list[Any]) -> None:
    """Compare answers: texts exactly, log-likelihoods up to rounding."""
    if kind == "generate_until":
        assert ours == theirs
        return
    for (score, is_greedy), (expected, is_expected) in zip(ours, theirs, strict=True):
        assert abs(score - expected) <= 1e-4 * abs(expected)
        assert is_greedy == is_expected


def main() -> None:
    """Answer each kind of request by turns, and print the ratios."""
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parse(parser)
    made = make_model(options.model, options.torch_dtype, quick=options.quick)
    results = Results(
        title=title(options, f"lm-evaluation-harness, {options.requests} requests"),
        columns=("requests", "hf, s", "torch-hybrid, s", "ratio"),
    )
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        train_tokenizer(made.config.vocab_size).save_pretrained(folder)
        hf = HFLM(folder, device="cpu", dtype=options.torch_dtype, batch_size=options.batch)
        alone = HFLM(folder, device="cpu", dtype=options.torch_dtype, batch_size=1)
        ours = HybridLM(folder, device="cpu", max_seqs=options.batch, max_tokens=512)
        for kind, requests in make_requests(options.requests).items():
            answer: dict[str, Callable[[], list[Any]]] = {
                "hf": partial(getattr(hf, kind), requests, disable_tqdm=True),
                "ours": partial(getattr(ours, kind), requests, disable_tqdm=True),
            }
            expected = getattr(alone, kind)(requests, disable_tqdm=True)
            check(kind, answer["ours"](), expected)
            num_differ = sum(a != b for a, b in zip(answer["hf"](), expected, strict=True))
            if kind == "generate_until":
                results.notes.append(f"hf in batches: {num_differ} texts differ from its own alone")
            times = interleave(answer, rounds=options.rounds, warm_up=0)
            ratio = times["hf"].over(times["ours"])
            results.add(kind, times["hf"].median, times["ours"].median, ratio)
    results.emit(options)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
