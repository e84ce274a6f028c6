"""What steps with drafts take, in plain steps of as many sequences.

The fastest of the last times of a kind counts: the machine has other work. A kind is a number of
sequences, rounded up to a power of 2, and a length of drafts; two drafts and more that are made at
once are of one kind. Its first step, and the first of each size, does not make it known, since it
may have been compiled. What drafts cost is believed half as much each time that it was not measured
for ``LONG`` steps: it may have been a slow spell.

The cost of a length that was not measured is on the line through the nearest ones that were; where
there are none, a draft is taken to add a tenth of a plain step.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

SLOPE = 0.1  # of a plain step, what a draft adds where nothing was measured
_KEPT, _FEWEST = 9, 2  # times of a kind
LONG = 256  # steps
BELIEVED = 5.0  # plain steps, the most of what steps of a kind take that is not known


@dataclass(slots=True)
class _Kind:
    noted: int  # the last step
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    num_counted: int = 0  # times that were no first steps'
    fastest: float = math.inf


class StepCosts:
    """The costs of one engine's steps.

    Args:
        num_drafts: the longest drafts.
        measures: go by times. Ranks that share a model must all decide alike, and their clocks
            differ.
        drafts_at_once: two drafts take as long to make as the most, as those of a head do.
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
        """Step ``now`` took so long; ``length`` of its longest draft, 0 for a plain one. What the
        first of its size says is that others take no longer."""
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
        """Whether plain steps of so many sequences were measured: else some have to come first."""
        return not self._measures or self._known(_size(num_seqs), 0) is not None

    def are_known_with_drafts(self, num_seqs: int) -> bool:
        """Whether steps of so many sequences were measured with drafts of some length."""
        size, lengths = _size(num_seqs), range(1, self._num_drafts + 1)
        return not self._measures or any(self._known(size, length) for length in lengths)

    def of(self, num_seqs: int, now: int) -> list[float]:
        """The cost of a step without drafts, which is 1, with up to one, and so on."""
        size, lengths = _size(num_seqs), range(self._num_drafts + 1)
        if (plain := self._known(size, 0)) is None:
            return [1.0 + SLOPE * length for length in lengths]
        known, least = {0: 1.0}, math.inf
        for length in reversed(lengths[1:]):
            if kind := self._known(size, length):
                least = min(least, kind.fastest / plain.fastest)  # longer ones do not take less
                known[length] = 1.0 + (least - 1.0) * 0.5 ** ((now - kind.noted) // LONG)
        return [self._between(known, length) for length in lengths]

    def charged(self, num_seqs: int, length: int) -> float:
        """The cost of a step that was run, or may be: that of its kind, or where that is not known
        the least that there was, as far as it can be believed."""
        size = _size(num_seqs)
        plain, kind = self._known(size, 0), self._kinds.get(self._key(size, length))
        if plain is None or kind is None:
            return 1.0 + SLOPE * length
        cost = kind.fastest / plain.fastest
        return cost if self._known(size, length) else min(cost, BELIEVED)

    def _between(self, known: dict[int, float], length: int) -> float:
        """The cost of a length, on the line through those that are known."""
        if length in known:
            return known[length]
        below = max(of for of in known if of < length)
        above = min((of for of in known if of > length), default=None)
        if above is not None:
            slope = (known[above] - known[below]) / (above - below)
        elif self._drafts_at_once:
            slope = SLOPE  # what one costs by itself says nothing of more
        else:
            slope = (known[below] - 1.0) / below if below else SLOPE
        return known[below] + slope * (length - below)

    def _key(self, size: int, length: int) -> tuple[int, int]:
        return size, min(length, 2) if self._drafts_at_once else length

    def _known(self, size: int, length: int) -> _Kind | None:
        kind = self._kinds.get(self._key(size, length))
        return kind if kind is not None and kind.num_counted >= _FEWEST else None


def _size(num_seqs: int) -> int:
    """Rounded up to a power of 2."""
    return 1 << (num_seqs - 1).bit_length()
