"""The engine's fuzz with prefixes that are kept, among prompts that begin alike.

Beside all that goes wrong there: pools too small for what could be kept, checkpoints and forks by
hand, and drafts, right and wrong ones. Every request must have the tokens that it gets from an
engine that does nothing of this.

    python -m tests.prefix_cache.fuzz --histories 10000
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace

import torch

import torch_hybrid as th
from tests.engine.fuzz import SIZES, Fuzz
from tests.speculation.drafters import Knowing
from tests.tiny_models import VOCAB_SIZE

FAMILIES = ["qwen3_next", "bailing_hybrid", "falcon_h1", "qwen3"]


class PrefixFuzz(Fuzz):
    """Rounds on one runner, by engines that keep prefixes."""

    def __init__(self, family: str, seed: int) -> None:
        draw = random.Random(seed)
        sizes = {
            "max_checkpoints": draw.choice([1, 3, 8]),
            "kv_tokens": draw.choice([160, 480]),
            "max_drafts": draw.choice([0, 3]),
        }
        super().__init__(family, seed, **sizes)
        self.alone = th.Runner(self.runner.model, **SIZES)
        self.seen: list[list[int]] = []
        self.engines: list[th.Engine] = []
        self.num_hits = self.num_evictions = self.num_returned = 0
        self.num_accepted = 0

    def make_engine(self) -> th.Engine:
        """One of this round, or one of an earlier one with what it keeps."""
        rng = self.rng
        if self.engines and rng.random() < 0.6:
            return rng.choice(self.engines)
        least = rng.choice([1, 3, 8])
        every = rng.choice([None, None, 8, 16])
        knows = Knowing(self._tokens_alone, vocab_size=VOCAB_SIZE, seed=rng.randrange(100))
        drafts = th.Speculation(knows, max_tokens=3, adapts=False)
        self.engines.append(
            th.Engine(
                self.runner,
                run_ahead=rng.choice(["off", "on"]),
                prefix_cache=th.PrefixCache(
                    min_tokens=least, every=every, host_bytes=rng.choice([0, 100_000, 1 << 22])
                ),
                speculate=drafts if self.runner.max_drafts and rng.random() < 0.7 else None,
            )
        )
        return self.engines[-1]

    def _tokens_alone(self, request: th.Request) -> list[int]:
        plain = replace(request.sampling, logits_processor=None)
        (output,) = th.Engine(self.alone).generate(request.prompt, plain)
        return output.tokens

    def draw_prompt(self) -> list[int]:
        """What was seen, cut anywhere, and something new after it."""
        rng = self.rng
        start = rng.choice(self.seen) if self.seen and rng.random() < 0.8 else []
        start = start[: rng.choice([rng.randint(0, len(start)), len(start)])]
        new = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 1, 5, 30]))]
        prompt = [*start, *new][:90] or [7]
        self.seen = [*self.seen[-11:], prompt]
        return prompt

    def round(self) -> None:
        """As ``Fuzz``; and what the engines keep comes back when they are closed."""
        self.fork = self._fork_by_hand() if self.rng.random() < 0.2 else None
        super().round()
        if self.rng.random() < 0.3:
            self.close()

    def _check(self, requests: list[tuple[th.Request, th.Sampling]]) -> None:
        if self.fork is not None:
            self._check_fork(*self.fork)
        self.seen += [request.history.copy() for request, _ in requests][-4:]
        super()._check(requests)

    def _fork_by_hand(self) -> tuple[th.Checkpoint, list[int]]:
        tokens = self.draw_prompt()[:20]
        (seq,) = self.runner.new_sequences(1)
        self.runner.extend([seq], [tokens])
        made = self.runner.checkpoint(seq)
        self.runner.free([seq])
        return made, tokens

    def _check_fork(self, made: th.Checkpoint, tokens: list[int]) -> None:
        """After all that others did, a fork goes on as the tokens themselves do."""
        runner = self.runner
        fork, own = *runner.new_sequences(1, start=made), *runner.new_sequences(1)
        runner.extend([own], [tokens])
        assert torch.equal(runner.extend([fork], [[1]]), runner.extend([own], [[1]]))
        runner.free([fork, own])
        runner.release(made)

    def close(self) -> None:
        """Close the engines; nothing may be left."""
        cache = self.runner.cache
        for engine in self.engines:
            stats = engine.stats().prefix_cache
            self.num_hits += stats.num_hits
            self.num_evictions += stats.num_evictions
            self.num_accepted += engine.stats().drafts.accepted
            self.num_returned += stats.num_returned
            engine.close()
            assert not engine._prefixes._uses, "a request is not forgotten"
        self.engines.clear()
        assert cache.pages.num_free == cache.num_pages, "a page is lost"
        assert cache.states.num_free == cache.states.capacity, "a state is lost"
        assert not cache.checkpoints._kept, "a checkpoint is lost"
        assert not cache.checkpoints.reclaimers


def run(family: str, *, seed: int, histories: int) -> PrefixFuzz:
    """Rounds until so many requests have ended."""
    fuzz = PrefixFuzz(family, seed)
    while fuzz.counts.requests < histories:
        fuzz.round()
    fuzz.close()
    return fuzz


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--histories", type=int, default=1000, help="of all families together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for family in args.families:
        done, seed = 0, args.seed
        while done < args.histories / len(args.families):
            fuzz = run(family, seed=seed, histories=100)
            done, seed = done + fuzz.counts.requests, seed + 1
            counts = f"{fuzz.num_hits} hits, {fuzz.num_returned} from the host"
            print(family, seed, fuzz.counts, counts, fuzz.num_evictions, "evictions", flush=True)


if __name__ == "__main__":
    main()
