"""Random histories of requests, whose reported log-probabilities a trainer has, bit for bit.

Prompts that begin alike come while others run, in chunks, from kept prefixes and as several samples
of one; drafts are tried, and pages are too few. Then one packed pass of a batch-invariant trainer
scores all texts.

    python -m tests.training.histories --histories 20000 --seed 1
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch

import torch_hybrid as th
from tests.tiny_models import VOCAB_SIZE, cast
from tests.training.twins import FAMILIES, make_pair

DTYPES = (torch.float32, torch.bfloat16)
SIZES = {"max_seqs": 4, "max_tokens": 24, "kv_tokens": 80, "page_size": 8, "compile": False}
DRAFTS = 3


@dataclass(kw_only=True)
class Counts:
    """What came to pass."""

    histories: int = 0
    tokens: int = 0
    hits: int = 0
    preemptions: int = 0
    accepted: int = 0


class Histories:
    """One trainer, a server of its weights, and rounds of random requests.

    ``served`` is the model that serves, if not a copy of the trainer; its MTP head drafts.
    """

    def __init__(self, trainer: Any, seed: int, served: th.HybridModel | None = None) -> None:
        self.rng = random.Random(seed)
        self.counts = Counts()
        self.trainer = trainer
        served = th.adapt(copy.deepcopy(trainer)) if served is None else served
        more = {"batch_invariant": True, "max_snapshots": 3, "max_drafts": DRAFTS}
        self.runner = th.Runner(served, **SIZES, **more)

    def round(self, num_requests: int = 6) -> None:
        """Serve requests by one engine, and compare; raises AssertionError where bits differ."""
        rng = self.rng
        stem = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
        kept = th.PrefixCache(min_tokens=rng.choice([1, 8]), every=rng.choice([None, 8]))
        drafter = "mtp" if self.runner.has_head else th.Ngram(shortest=1)
        drafts = th.Speculation(drafter, num_drafts=DRAFTS, adapts=False)
        requests: list[th.Request] = []
        with th.Engine(
            self.runner,
            prefix_cache=rng.choice([False, kept, kept]),
            speculate=rng.choice([None, drafts, drafts]),
        ) as engine:
            while engine.has_unfinished or len(requests) < num_requests:
                if len(requests) < num_requests and rng.random() < 0.6:
                    requests += self._submit(engine, stem)
                engine.step()
            stats = engine.stats()
        self.counts.preemptions += stats.num_preemptions
        self.counts.accepted += stats.drafts.accepted
        self.counts.hits += 0 if stats.prefix_cache is None else stats.prefix_cache.num_hits
        self._compare(requests)

    def _submit(self, engine: th.Engine, stem: list[int]) -> list[th.Request]:
        rng = self.rng
        tail = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 9]))]
        prompt = stem[: rng.choice([0, 7, 16, 25, 40])] + tail
        repeats = rng.random() < 0.5  # one token, which is drafted
        sampling = th.Sampling(
            max_new_tokens=rng.randint(1, 24),
            ignore_eos=True,
            temperature=rng.choice([0.0, 1.0]),
            logit_bias={tail[-1]: 1e4} if repeats else {},
            seed=rng.randrange(100),
            logprobs=0,
            prompt_logprobs=rng.choice([None, None, 0]),
        )
        return [engine.submit(prompt, sampling) for _ in range(rng.choice([1, 1, 2]))]

    def _compare(self, requests: list[th.Request]) -> None:
        self.rng.shuffle(requests)
        outputs = [request.output for request in requests]
        rows = [r.prompt + out.tokens for r, out in zip(requests, outputs, strict=True)]
        ends = [0, *itertools.accumulate(map(len, rows))]
        tokens = torch.tensor(list(itertools.chain(*rows)))
        with torch.no_grad():
            packing = th.Packing(torch.tensor(ends))
            logits = self.trainer(tokens[None], packing=packing, use_cache=False).logits[0]
        scores = th.token_logprobs(logits, tokens.roll(-1)).roll(1).tolist()
        for request, out, start, end in zip(requests, outputs, ends, ends[1:], strict=False):
            assert out.finish_reason == "length", out
            reported = [each.logprob for each in out.logprobs]
            assert reported == scores[end - len(reported) : end], (request.prompt, out)
            if out.prompt_logprobs is not None:
                of_prompt = [each.logprob for each in out.prompt_logprobs]
                first = start + len(request.prompt) - len(of_prompt)
                assert of_prompt == scores[first : start + len(request.prompt)], request.prompt
        self.counts.histories += len(requests)
        self.counts.tokens += len(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--histories", type=int, default=20_000, help="how many, of all families")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = list(itertools.product(args.families, DTYPES))
    for family, dtype in kinds:
        model = cast(make_pair(family)[0], dtype)
        trainer = th.make_trainable(model, batch_invariant={"compile": False})
        histories = Histories(trainer, args.seed)
        while histories.counts.histories < args.histories / len(kinds):
            histories.round()
        print(family, dtype, histories.counts, flush=True)


if __name__ == "__main__":
    main()
