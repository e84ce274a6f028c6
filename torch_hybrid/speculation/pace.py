"""How many drafts are worth trying: from what was accepted, and from what steps took.

A step of n sequences with up to L drafts each takes ``time(n, L)``. It gives a request, each draft
of which is accepted with probability p as long as those before it are,

    expected(p, L) = 1 + p + ... + p^L            tokens

The length of a step is the L of most expected tokens per second. Where that is 0, steps are plain
for a while, and then one has a draft of each request, to see whether that has changed: so seldom
that it costs little. Where drafts are mostly right, it has as many as there may be: if any number
pays, that does, and what was measured of it may have been a slow spell of the machine. In steps
with drafts, a request whose own are hardly accepted has one now and then too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_KEPT_TIMES, _FEWEST_TIMES = 9, 3  # the fastest counts: the machine has other work
_FADING = 0.9  # of what a request's earlier drafts say, at each step
_FADING_OF_ALL = 0.98  # of all requests together
_PRIOR, _PRIOR_WEIGHT = 0.6, 3.0  # of the first request, in drafts
_OWN_WEIGHT = 2.0  # of all requests together in the estimate of one, in drafts
_SLOPE = 0.1  # of a step's time, what a draft adds where nothing was measured
_LIKELY = 0.5  # accepted, on average, where a trial has more than one draft
_TRIALS = 0.015  # of the time without drafts, what trials may take
_SHORTEST_REST, _LONGEST_REST = 8, 256  # steps


@dataclass(slots=True)
class Acceptance:
    """How drafts fared: of those whose predecessors were all accepted, lately."""

    tried: float = 0.0
    accepted: float = 0.0

    def note(self, num_drafts: int, num_accepted: int, fading: float) -> None:
        """The drafts of one step."""
        self.tried = self.tried * fading + min(num_accepted + 1, num_drafts)
        self.accepted = self.accepted * fading + num_accepted

    def rate(self, prior: float, weight: float) -> float:
        """The probability of the next, where ``weight`` drafts of ``prior`` came before."""
        return (self.accepted + weight * prior) / (self.tried + weight)


@dataclass(slots=True)
class Rest:
    """A pause that is followed by one trial."""

    left: int = 0
    is_over: bool = False  # and the trial is due

    def pass_by(self) -> None:
        """One step later."""
        self.left = max(0, self.left - 1)

    def ends_in_trial(self, steps: int) -> bool:
        """Whether a trial is due, which is made now; else a pause of so many steps begins."""
        if not self.is_over:
            self.left = steps
        self.is_over = not self.is_over
        return not self.is_over

    def reset(self) -> None:
        """Something pays again."""
        self.left, self.is_over = 0, False


@dataclass(slots=True)
class Course:
    """What is remembered of a request; it rests for so many steps that have drafts of others."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    rest: Rest = field(default_factory=Rest)


class Pace:
    """Chooses the length of drafts.

    Args:
        max_tokens: the longest.
        measures: go by what steps took. Ranks that share a model must all decide alike, and their
            clocks differ: there a draft is taken to add a tenth of a step.
        drafts_at_once: several drafts take as long to make as the most, as those of a head do.
    """

    def __init__(
        self, max_tokens: int, *, measures: bool = True, drafts_at_once: bool = False
    ) -> None:
        self.max_tokens, self._measures = max_tokens, measures
        self._drafts_at_once = drafts_at_once
        self._all, self._rest = Acceptance(), Rest()
        # By sequences, rounded up to a power of 2, and the longest draft: seconds of a step. The
        # first step of a kind is not among them: it may have been compiled, or captured.
        self._times: dict[tuple[int, int], deque[float]] = {}

    @property
    def rests(self) -> bool:
        """Whether no step has drafts for now."""
        return self._rest.left > 0

    def note_step(self, num_seqs: int, length: int, seconds: float) -> None:
        """A step took so long; ``length`` of its longest draft, 0 for plain decoding."""
        self._rest.pass_by()
        if not self._measures:
            return
        key = _size(num_seqs), length
        if key in self._times:
            self._times[key].append(seconds)
        else:
            self._times[key] = deque(maxlen=_KEPT_TIMES)

    def note_drafts(self, course: Course, num_drafts: int, num_accepted: int) -> None:
        """So many drafts of a request were accepted."""
        course.acceptance.note(num_drafts, num_accepted, _FADING)
        self._all.note(num_drafts, num_accepted, _FADING_OF_ALL)

    def is_measured(self, num_seqs: int) -> bool:
        """Whether plain steps of so many sequences were: else some have to come first."""
        return not self._measures or self._is_known(_size(num_seqs), 0)

    def most(self, courses: Sequence[Course]) -> int:
        """Drafts of each request of a step that are worth proposing."""
        if not self._rest.is_over:
            return self.max_tokens
        return self._trial_length([self._rate(course) for course in courses])

    def lengths(self, courses: Sequence[Course], available: Sequence[int]) -> list[int]:
        """How many of its proposed drafts each request of a step tries.

        Args:
            courses: of the requests.
            available: drafts proposed for each, some for at least one.
        """
        rates = [self._rate(course) for course in courses]
        best = self._best_length(rates, available)
        if not best:
            length = self._trial_length(rates)
            steps = round((self._cost(len(courses), length) - 1.0) / _TRIALS)
            steps = min(max(steps, _SHORTEST_REST), _LONGEST_REST)
            tried = length if self._rest.ends_in_trial(steps) else 0
            return [min(most, tried) for most in available]
        self._rest.reset()
        cost = self._cost(len(courses), best)
        pairs = zip(courses, rates, available, strict=True)
        return [self._own_length(c, rate, min(best, most), cost) for c, rate, most in pairs]

    def _own_length(self, course: Course, rate: float, length: int, cost: float) -> int:
        """Of a request that other requests of the step would pay for: one draft now and then."""
        if expected(rate, length) >= 1.0 + (cost - 1.0) * length / self.max_tokens:
            course.rest.reset()
            return length
        course.rest.pass_by()
        tries = not course.rest.left and course.rest.ends_in_trial(_SHORTEST_REST)
        return min(length, int(tries))

    def _trial_length(self, rates: Sequence[float]) -> int:
        """Drafts of each request in a step that finds out whether drafts pay again."""
        return self.max_tokens if sum(rates) > _LIKELY * len(rates) else 1

    def _rate(self, course: Course) -> float:
        return course.acceptance.rate(self._all.rate(_PRIOR, _PRIOR_WEIGHT), _OWN_WEIGHT)

    def _best_length(self, rates: Sequence[float], available: Sequence[int]) -> int:
        """The length of most expected tokens per second."""
        pairs = list(zip(rates, available, strict=True))

        def gain(length: int) -> float:
            tokens = sum(expected(rate, min(length, most)) for rate, most in pairs)
            return tokens / self._cost(len(pairs), length)

        return max(range(min(max(available), self.max_tokens) + 1), key=gain)

    def _cost(self, num_seqs: int, length: int) -> float:
        """The time of a step with drafts of a length, over that of a plain one.

        A length that took longer than a larger one was measured when the machine had other work.
        """
        size = _size(num_seqs)
        lengths = [of for of in range(1, self.max_tokens + 1) if self._is_known(size, of)]
        if not lengths or not self._is_known(size, 0):
            return 1.0 + _SLOPE * length
        nearest = min(lengths, key=lambda of: abs(of - length))
        seconds = min(min(self._times[size, of]) for of in lengths if of >= nearest)
        ratio = seconds / min(self._times[size, 0])
        is_same = self._drafts_at_once and min(length, nearest) > 1
        return 1.0 + (ratio - 1.0) * (1.0 if is_same else length / nearest)

    def _is_known(self, size: int, length: int) -> bool:
        return len(self._times.get((size, length), ())) >= _FEWEST_TIMES


def expected(rate: float, length: int) -> float:
    """Tokens that a step of so many drafts gives."""
    return sum(rate**i for i in range(length + 1))


def _size(num_seqs: int) -> int:
    """Rounded up to a power of 2."""
    return 1 << (num_seqs - 1).bit_length()
