"""Acceptance rates of drafts: of one request, and of all requests of an engine.

Draft i of a step counts only if all drafts before it were accepted. Counts fade with every step,
with drafts or without. Rates start from an optimistic prior (``HOPE``), so drafts that failed for a
while are tried again.

    rate of an engine's draft i    its own counts, and ``WEIGHT`` drafts at the rate of draft i - 1
    rate of a request's draft i    its own counts, and ``WEIGHT`` drafts at the engine's rate
"""

from __future__ import annotations

from collections.abc import Sequence

HOPE = 0.95  # prior rate of the first draft
WEIGHT = 4.0  # of the prior, in drafts


class Acceptance:
    """Fading counts of tried and accepted drafts, by their place in a step.

    Args:
        num_drafts: the most drafts of a step.
        fading: factor on all counts at each step.
    """

    __slots__ = ("_accepted", "_fading", "_noted", "_tried")

    def __init__(self, num_drafts: int, fading: float) -> None:
        self._fading, self._noted = fading, 0
        self._tried, self._accepted = [0.0] * num_drafts, [0.0] * num_drafts

    def note(self, num_drafts: int, num_accepted: int, now: int) -> None:
        """Count the drafts of a request in step ``now``, up to the first rejected draft."""
        left = self._left(now)
        self._tried = [count * left for count in self._tried]
        self._accepted = [count * left for count in self._accepted]
        self._noted = now
        for place in range(min(num_accepted + 1, num_drafts)):
            self._tried[place] += 1.0
            self._accepted[place] += place < num_accepted

    def rates(self, now: int, expected: Sequence[float] | None = None) -> list[float]:
        """Estimate the probability of each draft, given that those before it are accepted.

        Args:
            now: the step.
            expected: prior rate of each draft; by default, the rate of the draft before it.
        """
        left, rates, before = self._left(now), [], HOPE
        for place, (tried, accepted) in enumerate(zip(self._tried, self._accepted, strict=True)):
            prior = before if expected is None else expected[place]
            before = (accepted * left + WEIGHT * prior) / (tried * left + WEIGHT)
            rates.append(before)
        return rates

    def _left(self, now: int) -> float:
        return self._fading ** (now - self._noted)


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Compute the expected tokens of a step with 0, 1, 2, ... drafts."""
    tokens, all_right = [1.0], 1.0
    for rate in rates:
        all_right *= rate
        tokens.append(tokens[-1] + all_right)
    return tokens
