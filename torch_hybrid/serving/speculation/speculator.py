"""Speculator: gives an engine's step its drafts, and records what became of them."""

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
    """Counts of an engine's drafts so far."""

    steps: int = 0  # with drafts
    drafted: int = 0  # tokens
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """Share of drafts that were accepted; 0 if there were none."""
        return self.accepted / max(1, self.drafted)


class Speculator:
    """Drafts for the steps of one engine, as far as they pay.

    Prompts run without drafts: a step that has a chunk of a prompt decodes the other requests
    plainly.

    Args:
        speculation: the options.
        runner: verifies the drafts.

    Raises:
        ValueError: the runner holds fewer drafts, or the drafter does not fit its model.
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
        # On a CPU, the thread's own time, which leaves out other work of the machine.
        on_host = runner.model.device.type == "cpu"
        self.clock: Callable[[], float] = time.thread_time if on_host else time.monotonic
        self._num_buckets = runner.num_buckets

    def may_draft(self, rows: Rows) -> bool:
        """Tell whether a step may get drafts, so that the histories of its rows must be known."""
        if self._pace.rests:
            return False
        return is_decode(rows) and any(self._most(request) for request, _ in rows)

    def drafts(self, rows: Rows) -> Drafts | None:
        """Draft tokens for each row of a step; None if it runs without drafts."""
        if self._pace.rests or not is_decode(rows) or not all(_is_last(r) for r, _ in rows):
            return None
        if self._speculation.adapts and not self._pace.is_measured(len(rows)):
            return None  # costs are in plain steps, which must be timed first
        drafts = self._drafts([request for request, _ in rows], self._room(rows))
        return drafts if any(drafts) else None

    def note(self, flight: InFlight, seconds: float) -> None:
        """Record a finished step and its duration by ``clock``."""
        num_before, self._num_buckets = self._num_buckets, self._runner.num_buckets
        is_first = self._num_buckets != num_before
        if any(flight.drafts):
            self._count(flight)
        if flight.is_decode:
            num_seqs, length = len(flight.requests), max(map(len, flight.drafts), default=0)
            num_tokens = num_seqs + sum(flight.num_accepted)
            self._pace.note_step(num_seqs, length, num_tokens, seconds, is_first=is_first)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
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
        """Draft as many tokens as are proposed, and pay; ``most`` is the limit of each request."""
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
        """Cut drafts before the first token outside of the model's vocabulary."""
        return list(takewhile(lambda token: 0 <= token < self._runner.vocab_size, drafts))

    def _that_pay(self, requests: Sequence[Request], most: Sequence[int]) -> list[int]:
        """Choose how many drafts of each request pay, up to ``most``."""
        if not self._speculation.adapts or not any(most):
            return list(most)
        courses = [self._course(request) for request in requests]
        return self._pace.lengths(courses, most)

    def _course(self, request: Request) -> Acceptance:
        if request not in self._courses:
            self._courses[request] = self._pace.new_course()
        return self._courses[request]

    def _most(self, request: Request) -> int:
        """Count the drafts that a request can use: its remaining tokens but one."""
        num_tokens = len(request.history) - len(request.prompt)
        left = request.sampling.max_new_tokens - num_tokens - 1
        return max(0, min(self._speculation.num_drafts, left))

    def _room(self, rows: Rows) -> list[int]:
        """Count each request's drafts that fit its remaining tokens, the step and the free
        pages."""
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
    """Tell whether a request lacks only the last token of its history."""
    return request.num_held + 1 == len(request.history)
