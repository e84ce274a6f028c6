"""Random modules of one's own, compiled, over random batches.

Each round takes a few kinds of mixers, a policy for MLA, a way to compile and, or not, buckets.
Sequences come and go; a step takes any of them, with any mix of lengths. All logits must be those
of the module that is not compiled, in batches that are not padded. There may be no more graphs than
the documented ones.

    python -m tests.layers.fuzz --seconds 600 --seed 1
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import counters

import torch_hybrid as th
from tests.by_hand import options
from tests.layers.own_modules import BLOCKS, VOCAB, Loop, OwnModule

LENGTHS = [0, 1, 1, 1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 64, 90]
BUCKETS = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
POLICIES = [
    th.PrefixPolicy(),
    th.PrefixPolicy(absorbed="always"),
    th.PrefixPolicy(absorbed="never"),
    th.PrefixPolicy(absorbed="never", one_shot=False, token_budget=512),
]


@dataclass(kw_only=True)
class Counts:
    """Counts of what came to pass."""

    rounds: int = 0
    steps: int = 0
    graphs: int = 0


class Round:
    """A module and what it is compiled to, both behind a loop of their own."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        torch._dynamo.reset()
        self.names = self.rng.sample(sorted(BLOCKS), self.rng.choice([1, 2, 3]))
        self.buckets = self.rng.choice([None, None, BUCKETS])
        self.dynamic = self.rng.choice([True, True, None])
        options: dict[str, Any] = {"prefix": self.rng.choice(POLICIES)}
        module = OwnModule(self.names)
        backend = self.rng.choice(["eager"] * 4 + ["aot_eager"])
        self.call = torch.compile(module, backend=backend, fullgraph=True, dynamic=self.dynamic)
        self.module = module
        self.compiled, self.eager = Loop(module, self.buckets, **options), Loop(module, **options)
        self.seqs: list[tuple[th.Sequence, th.Sequence]] = []

    @property
    def most_graphs(self) -> int:
        """Graphs of decode, of one token too unless steps are padded, and of all forms."""
        forms = [len(each.forms(th.Mode.EXTEND)) for each in self.compiled.backends.values()]
        return max(forms) + (1 if self.buckets else 2)

    def step(self) -> None:
        """Run a step of some sequences."""
        rng = self.rng
        if self.seqs and rng.random() < 0.3:
            ours, theirs = self.seqs.pop(rng.randrange(len(self.seqs)))
            self.compiled.cache.free([ours])
            self.eager.cache.free([theirs])
        num_new = min(rng.choice([0, 1, 1, 2, 5]), 9 - len(self.seqs))
        if num_new or not self.seqs:
            new = (loop.cache.allocate(max(1, num_new)) for loop in (self.compiled, self.eager))
            self.seqs += zip(*new, strict=True)
        taken = rng.sample(self.seqs, rng.randint(1, len(self.seqs)))
        lengths = [1] * len(taken)
        if rng.random() < 0.5:
            room = [200 - self.eager.cache.length(seq) for _, seq in taken]
            lengths = [max(0, min(rng.choice(LENGTHS), n)) for n in room]
        if not any(lengths):
            lengths[0] = 1
        tokens = [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]
        ours, theirs = zip(*taken, strict=True)
        expected = self.eager.run(self.module, theirs, tokens)
        torch.testing.assert_close(self.compiled.run(self.call, ours, tokens), expected)

    def run(self, num_steps: int) -> int:
        """Run so many steps, and return how many graphs they took."""
        before = counters["stats"]["unique_graphs"]
        for _ in range(num_steps):
            self.step()
        graphs: int = counters["stats"]["unique_graphs"] - before
        assert graphs <= self.most_graphs, f"{graphs} graphs, at most {self.most_graphs} expected"
        return graphs


def main() -> None:
    args = options(__doc__).parse_args()
    counts, end = Counts(), time.monotonic() + args.seconds
    while time.monotonic() < end:
        seed = args.seed + counts.rounds
        trial = Round(seed)
        try:
            counts.graphs += trial.run(30)
        except Exception:
            print(f"seed {seed}: {trial.names}, buckets {trial.buckets}, dynamic {trial.dynamic}")
            raise
        counts.rounds, counts.steps = counts.rounds + 1, counts.steps + 30
    print(counts)


if __name__ == "__main__":
    main()
