"""Choice of the number of drafts, from acceptance rates and step times.

A step of n sequences with up to L drafts each costs ``cost(n, L)`` plain steps. A request whose
draft i is accepted with probability a_i, given those before it, gets

    expected(L) = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_L            tokens

The chosen L has the most expected tokens for its cost. Unknown rates are optimistic
(``acceptance``): drafts are tried at the beginning, and again some time after they failed. One
draft at a time comes first, the cheapest way to measure. A credit account, in plain steps, bounds
the cost of trying:

    credit = START, refilled by 1 % of the plain steps that tokens would have taken
             + gains of steps with drafts, tokens / n - cost, or losses; up to MOST

A step has no more drafts than the credit covers if all are rejected. With ``ENOUGH`` credit it may
have any number. So drafts that are often right and had bad luck continue, fewer at a time, without
waiting for the 1 %. Even if all drafts fail, serving takes at most 1.01 times as long as without,
plus ``START`` plain steps and the loss of one step. At most ``MOST`` of the gains is put at risk
again.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_hybrid.serving.speculation.acceptance import Acceptance, expected_tokens
from torch_hybrid.serving.speculation.costs import StepCosts

START, MOST = 8.0, 16.0  # plain steps of credit
ENOUGH = 3.0  # credit to try any number of drafts
SHARE = 0.01  # credit per plain step
FADING = 0.9  # factor per step on a request's counts
FADING_OF_ALL = 0.98  # on the engine's counts
# Steps of a rest, before drafts are considered again; doubled each time they do not pay.
SHORTEST_REST, LONGEST_REST = 8, 64


class Pace:
    """Choice of the number of drafts for each step.

    Args:
        num_drafts: the most drafts of a request.
        costs: costs of steps.
    """

    def __init__(self, num_drafts: int, costs: StepCosts) -> None:
        self.num_drafts, self._costs = num_drafts, costs
        self._all = Acceptance(num_drafts, FADING_OF_ALL)
        self._now = 0  # steps so far
        self._left, self._rest = 0, SHORTEST_REST  # steps of this rest, and of the next one
        self._credit = START

    @property
    def rests(self) -> bool:
        """True while no step gets drafts, after drafts did not pay."""
        return self._left > 0

    def new_course(self) -> Acceptance:
        """Make the acceptance record of a new request."""
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
        """Record a step: its tokens, its duration, and ``length``, its most drafts (0: plain step).

        The first step of a bucket is charged, and gives an upper bound for later ones.
        """
        self._now += 1
        self._left = max(0, self._left - 1)
        self._costs.note(num_seqs, length, seconds, self._now, is_first=is_first)
        plain_steps = num_tokens / num_seqs
        cost = self._costs.charged(num_seqs, length) if length else 1.0
        if self._credit < START:
            self._credit = min(START, self._credit + SHARE * plain_steps)
        self._credit = min(MOST, self._credit + plain_steps - cost)

    def note_drafts(self, course: Acceptance, num_drafts: int, num_accepted: int) -> None:
        """Record how many drafts of a request were accepted; ``note_step`` of that step follows."""
        for acceptance in (course, self._all):
            acceptance.note(num_drafts, num_accepted, self._now)

    def is_measured(self, num_seqs: int) -> bool:
        """Tell whether plain steps of this many sequences were measured; drafts wait until then."""
        return self._costs.are_known(num_seqs)

    def lengths(self, courses: Sequence[Acceptance], available: Sequence[int]) -> list[int]:
        """Choose the number of drafts of each request in a step.

        Args:
            courses: acceptance records of the requests.
            available: the most drafts that each may have.
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
        # A request whose drafts would gain less than their cost gets none.
        return [
            length if own[length] > 1.0 + (costs[best] - 1.0) * length / best else 0
            for own, length in zip(tokens, (min(best, most) for most in available), strict=True)
        ]

    def _that_may_be_lost(self, num_seqs: int, most: int) -> list[int]:
        """List the numbers of drafts that the credit covers; at most one while costs are
        unknown."""
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
        """Choose no drafts; a rest begins, unless drafts were limited by room alone."""
        if max(available) == self.num_drafts:
            self._left, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
        return [0] * len(available)
