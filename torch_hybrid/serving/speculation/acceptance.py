"""How likely drafts are: of one request, and of all requests of an engine.

Draft i of a step counts if all those before it were accepted. What is remembered fades with every
step that passes, whether it had drafts or not, and where nothing is remembered something is hoped
for: so what has gone wrong for a while is tried again.

    of an engine's draft i     what happened to it, beside ``WEIGHT`` drafts like draft i - 1
    of a request's             what happened to it, beside ``WEIGHT`` drafts like the engine's
"""

from __future__ import annotations

from collections.abc import Sequence

HOPE = 0.95  # of a first draft that nothing is known of
WEIGHT = 4.0  # of what is expected beforehand, in drafts


class Acceptance:
    """What became of drafts, by their place in a step.

    Args:
        num_drafts: the most drafts of a step.
        fading: what one step leaves of the weight of those before it.
    """

    __slots__ = ("_accepted", "_fading", "_noted", "_tried")

    def __init__(self, num_drafts: int, fading: float) -> None:
        self._fading, self._noted = fading, 0
        self._tried, self._accepted = [0.0] * num_drafts, [0.0] * num_drafts

    def note(self, num_drafts: int, num_accepted: int, now: int) -> None:
        """The drafts of a request in step ``now``: those after the first that is wrong say
        nothing."""
        left = self._left(now)
        self._tried = [count * left for count in self._tried]
        self._accepted = [count * left for count in self._accepted]
        self._noted = now
        for place in range(min(num_accepted + 1, num_drafts)):
            self._tried[place] += 1.0
            self._accepted[place] += place < num_accepted

    def rates(self, now: int, expected: Sequence[float] | None = None) -> list[float]:
        """The probability of each draft, where those before it are accepted.

        Args:
            now: the step.
            expected: of each beforehand; by default as much as of the one before it.
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
    """Tokens that a step gives with no draft, with one, and so on."""
    tokens, all_right = [1.0], 1.0
    for rate in rates:
        all_right *= rate
        tokens.append(tokens[-1] + all_right)
    return tokens
