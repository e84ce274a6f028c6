"""A drafter that knows what comes, and is wrong as often as a test wants."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from torch_hybrid.serving.request import Request


class Knowing:
    """Drafts the tokens that a request will get, at random up to as many as are asked for, but for
    wrong ones here and there.

    Args:
        tokens_of: of a request, all that it gets.
        share: of drafts that are right.
        vocab_size: that wrong ones are of.
    """

    def __init__(
        self,
        tokens_of: Callable[[Request], Sequence[int]],
        *,
        share: float = 0.7,
        vocab_size: int = 50,
        seed: int = 0,
    ) -> None:
        self._tokens_of, self._share, self._vocab_size = tokens_of, share, vocab_size
        self._rng = random.Random(seed)
        self.forgotten: list[Request] = []

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        return [self._after(x, count) for x, count in zip(requests, counts, strict=True)]

    def forget(self, request: Request) -> None:
        self.forgotten.append(request)

    def _after(self, request: Request, count: int) -> list[int]:
        rng, known = self._rng, list(self._tokens_of(request))
        begin = len(request.tokens)
        drafts = known[begin : begin + rng.randint(0, count)]
        return [
            token if rng.random() < self._share else (token + 1) % self._vocab_size
            for token in drafts
        ]
