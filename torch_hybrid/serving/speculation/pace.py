"""How many drafts are worth trying: from what was accepted, and from what steps took.

A step of n sequences with up to L drafts each takes as long as ``cost(n, L)`` plain ones. It gives
a request, whose draft i is accepted with probability a_i where those before it are,

    expected(L) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_L            tokens

The length of a step is the L of most expected tokens for its cost. What is not known is hoped for
(``acceptance``), so that drafts are tried at the beginning, and again some time after they went
wrong: one at a time at first, which is the cheapest way to learn what they are worth. An account
bounds what that may cost, in plain steps:

    credit = START, which fills up again by 1 % of the plain steps that tokens would have taken
             + what steps with drafts gain, tokens / n - cost, or lose; up to MOST

A step has no more drafts than the credit covers if all are wrong, or any number where there is
``ENOUGH`` of it. So drafts that are often right and had bad luck go on, fewer at a time, and need
not wait for the 1 %. Whatever becomes of drafts, serving takes at most 1.01 times as long as
without, and ``START`` plain steps, and what one step loses; and of what drafts have gained, no more
than ``MOST`` is put at risk again.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_hybrid.serving.speculation.acceptance import Acceptance, expected_tokens
from torch_hybrid.serving.speculation.costs import StepCosts

START, MOST = 8.0, 16.0  # plain steps of credit
ENOUGH = 3.0  # of it, to try any number of drafts
SHARE = 0.01  # of a plain step, what it adds to the credit
FADING = 0.9  # of what a request's drafts say, at each step
FADING_OF_ALL = 0.98  # of all requests together
# Steps before it is looked at again whether drafts would pay; twice as many each time they do not.
SHORTEST_REST, LONGEST_REST = 8, 64


class Pace:
    """Chooses the length of drafts.

    Args:
        num_drafts: the longest.
        costs: of steps.
    """

    def __init__(self, num_drafts: int, costs: StepCosts) -> None:
        self.num_drafts, self._costs = num_drafts, costs
        self._all = Acceptance(num_drafts, FADING_OF_ALL)
        self._now = 0  # steps so far
        self._left, self._rest = 0, SHORTEST_REST  # steps of this rest, and of the next one
        self._credit = START

    @property
    def rests(self) -> bool:
        """Whether no step has drafts for now."""
        return self._left > 0

    def new_course(self) -> Acceptance:
        """What will be remembered of a request."""
        return Acceptance(self.num_drafts, FADING)

    def note_step(
        self,
        num_seqs: int,
        length: int,
        num_tokens: int,
        seconds: float,
        *,
        is_first: bool = False,
    ) -> None:
        """A step gave so many tokens, in so long; ``length`` of its longest draft, 0 for a plain
        one. The first of its size tells others that they take no longer, and is charged."""
        self._now += 1
        self._left = max(0, self._left - 1)
        self._costs.note(num_seqs, length, seconds, self._now, is_first=is_first)
        plain_steps = num_tokens / num_seqs
        cost = self._costs.charged(num_seqs, length) if length else 1.0
        if self._credit < START:
            self._credit = min(START, self._credit + SHARE * plain_steps)
        self._credit = min(MOST, self._credit + plain_steps - cost)

    def note_drafts(self, course: Acceptance, num_drafts: int, num_accepted: int) -> None:
        """So many drafts of a request were accepted, in the step that is noted next."""
        for acceptance in (course, self._all):
            acceptance.note(num_drafts, num_accepted, self._now)

    def is_measured(self, num_seqs: int) -> bool:
        """Whether plain steps of so many sequences were: else some have to come first."""
        return self._costs.are_known(num_seqs)

    def lengths(self, courses: Sequence[Acceptance], available: Sequence[int]) -> list[int]:
        """How many drafts each request of a step tries.

        Args:
            courses: of the requests.
            available: drafts that each may have at most.
        """
        num_seqs = len(courses)
        costs = self._costs.of(num_seqs, self._now)
        of_all = self._all.rates(self._now)
        tokens = [expected_tokens(course.rates(self._now, of_all)) for course in courses]

        def gain(length: int) -> float:
            each = (own[min(length, most)] for own, most in zip(tokens, available, strict=True))
            return sum(each) / costs[length]

        best = max(self._that_may_be_lost(num_seqs, max(available)), key=gain)
        if not best:
            return self._none(available)
        self._rest = SHORTEST_REST
        # A request that others of the step would pay for has none.
        return [
            length if own[length] > 1.0 + (costs[best] - 1.0) * length / best else 0
            for own, length in zip(tokens, (min(best, most) for most in available), strict=True)
        ]

    def _that_may_be_lost(self, num_seqs: int, most: int) -> list[int]:
        """The lengths that may be tried: one, as long as what drafts cost was not measured."""
        costs = self._costs
        longest = most if costs.are_known_with_drafts(num_seqs) else min(most, 1)
        return [
            length
            for length in range(longest + 1)
            if not length
            or self._credit >= ENOUGH
            or self._credit >= costs.charged(num_seqs, length) - 1.0
        ]

    def _none(self, available: Sequence[int]) -> list[int]:
        """No drafts: a rest begins, unless it is only that there are too few."""
        if max(available) == self.num_drafts:
            self._left, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
        return [0] * len(available)
