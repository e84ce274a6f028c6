"""What an engine asks before a step and tells after it, where it speculates."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from torch_hybrid.serving.in_flight import Drafts, InFlight, Rows, is_decode
from torch_hybrid.serving.request import Request
from torch_hybrid.serving.speculation.acceptance import Acceptance
from torch_hybrid.serving.speculation.costs import StepCosts
from torch_hybrid.serving.speculation.head import Head
from torch_hybrid.serving.speculation.pace import Pace
from torch_hybrid.serving.speculation.parameters import Speculation

if TYPE_CHECKING:
    from torch_hybrid.graphs.runner import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """What an engine's drafts came to so far."""

    steps: int = 0  # that had drafts
    drafted: int = 0  # tokens
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """The share of drafts that were accepted; 0 where none was made."""
        return self.accepted / max(1, self.drafted)


class Speculator:
    """Drafts for the steps of one engine, as far as that pays.

    Prompts are run without drafts: a step that has a part of one decodes the others plainly.

    Args:
        speculation: as the engine's caller wants it.
        runner: that verifies.

    Raises:
        ValueError: the runner holds fewer drafts, or the drafter cannot draft for its model.
    """

    def __init__(self, speculation: Speculation, runner: Runner) -> None:
        if runner.max_drafts < speculation.num_drafts:
            raise ValueError(
                f"speculate with num_drafts={speculation.num_drafts} needs a runner of as many "
                f"max_drafts, got max_drafts={runner.max_drafts}"
            )
        self.counts = DraftCounts()
        self._runner, self._speculation = runner, speculation
        self._drafter = speculation.make_drafter(runner)
        ranks = runner.model.ranks
        costs = StepCosts(
            speculation.num_drafts,
            measures=ranks is None or ranks.size == 1,
            drafts_at_once=isinstance(self._drafter, Head),
        )
        self._pace = Pace(speculation.num_drafts, costs)
        self._courses: dict[Request, Acceptance] = {}
        # On a host the thread's own time, in which nothing is that others on the machine do.
        on_host = runner.model.device.type == "cpu"
        self.clock: Callable[[], float] = time.thread_time if on_host else time.monotonic
        self._num_buckets = runner.num_buckets

    def may_draft(self, rows: Rows) -> bool:
        """Whether a step of these rows may get drafts, so that their histories must be known."""
        if self._pace.rests:
            return False
        return is_decode(rows) and any(self._most(request) for request, _ in rows)

    def drafts(self, rows: Rows) -> Drafts | None:
        """Drafts for each row of a step; None where it is to be run without."""
        if self._pace.rests or not is_decode(rows) or not all(_is_last(r) for r, _ in rows):
            return None
        if self._speculation.adapts and not self._pace.is_measured(len(rows)):
            return None  # what drafts cost is not known before plain steps were timed
        drafts = self._drafts([request for request, _ in rows], self._room(rows))
        return drafts if any(drafts) else None

    def note(self, flight: InFlight, seconds: float) -> None:
        """A step has landed, after so long by ``clock``."""
        num_before, self._num_buckets = self._num_buckets, self._runner.num_buckets
        is_first = self._num_buckets != num_before
        if any(flight.drafts):
            self._count(flight)
        if flight.is_decode:
            num_seqs, length = len(flight.requests), max(map(len, flight.drafts), default=0)
            num_tokens = num_seqs + sum(flight.num_accepted)
            self._pace.note_step(num_seqs, length, num_tokens, seconds, is_first=is_first)

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._courses.pop(request, None)
        self._drafter.forget(request)

    def _count(self, flight: InFlight) -> None:
        tried = list(zip(flight.sampled, flight.drafts, flight.num_accepted, strict=True))
        for request, drafts, count in tried:
            if drafts and request in self._courses:
                self._pace.note_drafts(self._courses[request], len(drafts), count)
        self.counts = replace(
            self.counts,
            steps=self.counts.steps + 1,
            drafted=self.counts.drafted + sum(map(len, flight.drafts)),
            accepted=self.counts.accepted + sum(flight.num_accepted),
        )

    def _drafts(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """As many as are proposed, and pay."""
        wanted = self._that_pay(requests, most)
        asked = [(r, count) for r, count in zip(requests, wanted, strict=True) if count]
        proposed = self._drafter.propose([r for r, _ in asked], [count for _, count in asked])
        by_request = dict(zip((r for r, _ in asked), proposed, strict=True))
        drafts = [
            self._known(by_request.get(request, [])[:count])
            for request, count in zip(requests, wanted, strict=True)
        ]
        lengths = list(map(len, drafts))
        if lengths == wanted:
            return drafts
        kept = self._that_pay(requests, lengths)
        return [own[:length] for own, length in zip(drafts, kept, strict=True)]

    def _known(self, drafts: Sequence[int]) -> list[int]:
        """Drafts up to the first one that the model's vocabulary lacks, which is just wrong."""
        return list(takewhile(lambda token: 0 <= token < self._runner.vocab_size, drafts))

    def _that_pay(self, requests: Sequence[Request], most: Sequence[int]) -> list[int]:
        """Of so many drafts of each request."""
        if not self._speculation.adapts or not any(most):
            return list(most)
        courses = [self._course(request) for request in requests]
        return self._pace.lengths(courses, most)

    def _course(self, request: Request) -> Acceptance:
        if request not in self._courses:
            self._courses[request] = self._pace.new_course()
        return self._courses[request]

    def _most(self, request: Request) -> int:
        """Drafts that a request can use now: all but the last of its tokens to come."""
        num_tokens = len(request.history) - len(request.prompt)
        left = request.sampling.max_new_tokens - num_tokens - 1
        return max(0, min(self._speculation.num_drafts, left))

    def _room(self, rows: Rows) -> list[int]:
        """Drafts that each request can use, and that the step has tokens and the pool pages for."""
        runner = self._runner
        tokens, pages = runner.max_tokens - len(rows), runner.free_pages
        sequences = [request.sequence for request, _ in rows]
        pages -= sum(runner.pages_needed(s, 1) for s in sequences if s is not None)
        fitting = []
        for (request, _), sequence in zip(rows, sequences, strict=True):
            assert sequence is not None
            count, kept = min(self._most(request), tokens), runner.pages_needed(sequence, 1)
            while count and runner.pages_needed(sequence, 1 + count) - kept > pages:
                count -= 1
            pages -= runner.pages_needed(sequence, 1 + count) - kept
            tokens -= count
            fitting.append(count)
        return fitting


def _is_last(request: Request) -> bool:
    """Whether it is the last token of a history that a request runs next."""
    return request.num_held + 1 == len(request.history)
