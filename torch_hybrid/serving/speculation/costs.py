"""Measured costs of steps with drafts, in plain steps of as many sequences.

A kind of step is a number of sequences, rounded up to a power of 2, and a number of drafts. All
numbers from two on are one kind where a head drafts them at once. The cost of a kind is the fastest
of its last times, since the machine has other work. The first step of a kind, or of a new bucket,
does not make the kind known: it may include compilation. The excess over a plain step is halved for
each ``LONG`` steps without a measurement: the measured spell may have been slow.

The cost of a number of drafts that was not measured is interpolated between the nearest measured
ones. Without any, each draft adds a tenth of a plain step.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

SLOPE = 0.1  # plain steps that a draft adds if nothing was measured
_KEPT, _FEWEST = 9, 2  # times of a kind: the most kept, and the fewest that make it known
LONG = 256  # steps
BELIEVED = 5.0  # plain steps: the most that a step of an unmeasured kind is charged


@dataclass(slots=True)
class _Kind:
    noted: int  # the last step
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    num_counted: int = 0  # times without first steps
    fastest: float = math.inf


class StepCosts:
    """Costs of one engine's steps.

    Args:
        num_drafts: the most drafts of a request.
        measures: use measured times. False where ranks share a model: they must decide alike, and
            their clocks differ.
        drafts_at_once: two drafts take as long to make as any more, as a head's do.
    """

    def __init__(
        self, num_drafts: int, *, measures: bool = True, drafts_at_once: bool = False
    ) -> None:
        self._num_drafts, self._measures = num_drafts, measures
        self._drafts_at_once = drafts_at_once
        self._kinds: dict[tuple[int, int], _Kind] = {}

    def note(
        self, num_seqs: int, length: int, seconds: float, now: int, *, is_first: bool = False
    ) -> None:
        """Record the duration of step ``now``; ``length`` is its most drafts, 0 for a plain step.

        ``is_first``: the step may include compilation, so its time is only an upper bound.
        """
        if not self._measures:
            return
        key = self._key(_size(num_seqs), length)
        is_counted = not is_first and key in self._kinds
        kind = self._kinds.setdefault(key, _Kind(noted=now))
        if now - kind.noted > LONG:
            kind.times.clear()
            kind.num_counted = 0
        kind.times.append(seconds)
        kind.num_counted += is_counted
        kind.fastest, kind.noted = min(kind.times), now

    def are_known(self, num_seqs: int) -> bool:
        """Tell whether plain steps of this many sequences were measured."""
        return not self._measures or self._known(_size(num_seqs), 0) is not None

    def are_known_with_drafts(self, num_seqs: int) -> bool:
        """Tell whether steps of this many sequences were measured with any number of drafts."""
        size, lengths = _size(num_seqs), range(1, self._num_drafts + 1)
        return not self._measures or any(self._known(size, length) for length in lengths)

    def of(self, num_seqs: int, now: int) -> list[float]:
        """Estimate the costs of steps with 0, 1, ... drafts; a plain step costs 1."""
        size, lengths = _size(num_seqs), range(self._num_drafts + 1)
        if (plain := self._known(size, 0)) is None:
            return [1.0 + SLOPE * length for length in lengths]
        known, least = {0: 1.0}, math.inf
        for length in reversed(lengths[1:]):
            if kind := self._known(size, length):
                least = min(least, kind.fastest / plain.fastest)  # more drafts do not take less
                known[length] = 1.0 + (least - 1.0) * 0.5 ** ((now - kind.noted) // LONG)
        return [self._between(known, length) for length in lengths]

    def charged(self, num_seqs: int, length: int) -> float:
        """Return the cost that the credit account charges for a step.

        This is the cost of its kind. While that is unmeasured, it is the fastest time so far, up to
        ``BELIEVED``.
        """
        size = _size(num_seqs)
        plain, kind = self._known(size, 0), self._kinds.get(self._key(size, length))
        if plain is None or kind is None:
            return 1.0 + SLOPE * length
        cost = kind.fastest / plain.fastest
        return cost if self._known(size, length) else min(cost, BELIEVED)

    def _between(self, known: dict[int, float], length: int) -> float:
        """Interpolate the cost of a number of drafts between known costs."""
        if length in known:
            return known[length]
        below = max(of for of in known if of < length)
        above = min((of for of in known if of > length), default=None)
        if above is not None:
            slope = (known[above] - known[below]) / (above - below)
        elif self._drafts_at_once:
            slope = SLOPE  # the cost of one draft says nothing of more
        else:
            slope = (known[below] - 1.0) / below if below else SLOPE
        return known[below] + slope * (length - below)

    def _key(self, size: int, length: int) -> tuple[int, int]:
        return size, min(length, 2) if self._drafts_at_once else length

    def _known(self, size: int, length: int) -> _Kind | None:
        kind = self._kinds.get(self._key(size, length))
        return kind if kind is not None and kind.num_counted >= _FEWEST else None


def _size(num_seqs: int) -> int:
    """Round up to a power of 2."""
    return 1 << (num_seqs - 1).bit_length()
