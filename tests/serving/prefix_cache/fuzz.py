"""The engine's fuzz with prefixes that are kept, among prompts that begin alike.

Beside all that goes wrong there: pools too small for what could be kept, prefixes that are saved
and loaded between steps, snapshots and forks by hand, images, and drafts of every kind. Every
request must have the tokens that it gets from an engine that does nothing of this.

    python -m tests.serving.prefix_cache.fuzz --histories 10000
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import torch_hybrid as th
from tests.models.mtp_checkpoint import make_checkpoint
from tests.serving.fuzz import SIZES, Fuzz
from tests.serving.speculation.drafters import Knowing
from tests.tiny_models import FEWEST_LAYERS, VOCAB_SIZE, make_hybrid
from tests.tiny_vision import IMAGE, Seen, make_seen, make_vision_model

WITH_HEAD, WITH_IMAGES = "qwen3_next with its head", "qwen3_5 with images"
FAMILIES = ["qwen3_next", "bailing_hybrid", "falcon_h1", "qwen3", WITH_HEAD, WITH_IMAGES]
# Images at the ends of prompts, and where a chunk of 48 tokens or a page ends.
PARTS = [[28, (4, 6)], [20, (2, 2), 30, (2, 2)], [41, (4, 4), 3], [(2, 2), 5], [22, (4, 6), 2]]
DRAFTS = 3


class Adversary:
    """Drafts at random: more than asked, none, or tokens beyond the vocabulary."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def propose(self, requests: Sequence[th.Request], counts: Sequence[int]) -> list[list[int]]:
        draw = self._rng
        return [
            [draw.choice([1, request.history[-1], VOCAB_SIZE + 9]) for _ in range(count + 2)]
            if draw.random() < 0.8
            else []
            for request, count in zip(requests, counts, strict=True)
        ]

    def forget(self, request: th.Request) -> None:
        pass


class PrefixFuzz(Fuzz):
    """Rounds on one runner, by engines that keep prefixes."""

    def __init__(self, family: str, seed: int) -> None:
        draw = random.Random(seed)
        sizes = {
            "max_snapshots": draw.choice([1, 3, 8]),
            "kv_tokens": draw.choice([160, 480]),
            "max_drafts": draw.choice([0, DRAFTS, DRAFTS]),
            "max_seqs": draw.choice([2, 4]),
        }
        super().__init__(family, seed, **sizes)
        self.alone = th.Runner(self.runner.model, **SIZES)
        self.smaller = th.Runner(
            make_hybrid(seed=1), **{**SIZES, "max_seqs": 6, "kv_tokens": 960}, max_snapshots=3
        )
        self.known = [self.draw_new(30 + own) for own in range(4)]
        self.seen: list[list[int]] = []
        self.engines: list[th.Engine] = []
        self.num_hits = self.num_evictions = self.num_returned = 0
        self.num_accepted = 0

    def make_model(self, family: str) -> th.HybridModel:
        if family == WITH_HEAD:
            with TemporaryDirectory() as folder:
                make_checkpoint("qwen3_next_dense", Path(folder))
                return th.from_pretrained(folder, mtp=True)
        if family == WITH_IMAGES:
            hf_model = make_vision_model("qwen3_5", **FEWEST_LAYERS["qwen3_5"])
            return th.adapt(hf_model, vision=True)
        return super().make_model(family)

    def draw_speculation(self) -> th.Speculation:
        knows = Knowing(self._tokens_alone, vocab_size=VOCAB_SIZE, seed=self.rng.randrange(100))
        drafters = [knows, Adversary(self.rng), th.Ngram(shortest=1), self.smaller]
        drafters += ["mtp", "mtp"] if self.runner.has_head else []
        return th.Speculation(self.rng.choice(drafters), num_drafts=DRAFTS, adapts=False)

    def make_engine(self) -> th.Engine:
        """One of this round, or one of an earlier one with what it keeps."""
        rng = self.rng
        if self.engines and rng.random() < 0.6:
            return rng.choice(self.engines)
        least = rng.choice([1, 3, 8])
        every = rng.choice([None, None, 8, 16])
        self.engines.append(
            th.Engine(
                self.runner,
                run_ahead=rng.choice(["off", "on"]),
                prefix_cache=th.PrefixCache(
                    min_tokens=least, every=every, host_bytes=rng.choice([0, 100_000, 1 << 22])
                ),
                speculate=self.draw_speculation()
                if self.runner.max_drafts and rng.random() < 0.8
                else None,
            )
        )
        return self.engines[-1]

    def _tokens_alone(self, request: th.Request) -> list[int]:
        plain = replace(request.sampling, logits_processor=None)
        (output,) = th.Engine(self.alone).generate(self.asked[request], plain)
        return output.tokens

    def draw_new(self, count: int) -> list[int]:
        return [self.rng.randrange(min(VOCAB_SIZE, IMAGE)) for _ in range(count)]

    def draw_prompt(self) -> object:
        """What was seen, cut anywhere, and something new after it; or one of a few that come again
        and again, of images too."""
        rng = self.rng
        if self.runner.model.vision is not None and rng.random() < 0.7:
            seen = make_seen("qwen3_5", rng.choice(PARTS))
            cut = seen.tokens[:-1] if rng.random() < 0.5 else seen.tokens  # after an image's last
            return Seen([*cut, *self.draw_new(rng.choice([0, 0, 1, 9]))], seen.inputs).encoded
        if rng.random() < 0.4:
            return rng.choice(self.known)
        start = rng.choice(self.seen) if self.seen and rng.random() < 0.8 else []
        start = start[: rng.choice([rng.randint(0, len(start)), len(start)])]
        new = self.draw_new(rng.choice([0, 1, 5, 30]))
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
        texts = [request for request, _ in requests if request.images is None]
        self.seen += [request.history.copy() for request in texts][-4:]
        super()._check(requests)

    def _fork_by_hand(self) -> tuple[th.Snapshot, list[int]]:
        tokens = self.draw_new(20)
        (seq,) = self.runner.new_sequences(1)
        self.runner.extend([seq], [tokens])
        made = self.runner.snapshot(seq)
        self.runner.free([seq])
        return made, tokens

    def _step(self, engine: th.Engine) -> None:
        """As ``Fuzz``; at times what one engine keeps is loaded by another one before."""
        if self.rng.random() < 0.04:
            with TemporaryDirectory() as folder:
                engine.save_prefixes(Path(folder) / "prefixes")
                self.rng.choice(self.engines).load_prefixes(Path(folder) / "prefixes")
        super()._step(engine)

    def _check_fork(self, made: th.Snapshot, tokens: list[int]) -> None:
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
        assert not cache.snapshots._kept, "a snapshot is lost"
        assert not cache.snapshots.reclaimers


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
