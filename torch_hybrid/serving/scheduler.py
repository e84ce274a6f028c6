"""Which tokens the next step runs: continuous batching as arithmetic on counts.

Contract: a step never holds more tokens than the budget, never asks for a page or a slot that is
not free, and names a job at most once. Jobs are served in order of arrival, but for those that wait
for pages: smaller ones may pass them. A waiting job is passed by at most ``MAX_PASSES`` others in
its life, and the first running job always gets on, so none starves. No tensor and no model is known
here.

    for each running job, oldest first:       (decodes come before the one unfinished prompt)
        take its missing tokens, within the budget
        out of pages: the latest admitted job gives its own back and is recomputed later
    for each waiting job, oldest first, while slots and some budget are left:
        pages for its whole history are free: admit it; it passes those that were left waiting
        else leave it waiting; nobody passes it if it was passed often enough

Where prefixes are kept (``Starts``), a job starts from one, which takes fewer tokens and pages; one
that a running job is about to reach is waited for; and a chunk ends where one is to be kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from torch_hybrid.caches.snapshot import Snapshot

MAX_PASSES = 16


class Job(Protocol):
    """A request as the scheduler sees it: two counts.

    A job decodes when one token is missing; with more of them missing it has a prompt to run, and
    with none it waits for its last token.

    Attributes:
        num_passes: how many jobs were admitted before it that came later.
    """

    num_passes: int

    @property
    def num_tokens(self) -> int:
        """Its history: prompt and generated tokens, those under way included."""
        ...

    @property
    def num_held(self) -> int:
        """How many of them the runner holds; 0 while it waits."""
        ...


JobT = TypeVar("JobT", bound=Job)
AnyJob = TypeVar("AnyJob", bound=Job, contravariant=True)


@dataclass(frozen=True, slots=True)
class Start:
    """What an admitted job holds before its first step; nothing by default.

    ``num_pages`` it need not take from the free ones, for what it holds. It can be negative: the
    last page is copied, and both may count.
    """

    num_tokens: int = 0
    num_pages: int = 0
    snapshot: Snapshot | None = None


FROM_NOTHING = Start()


class Starts(Protocol[AnyJob]):
    """Knows prefixes that are kept."""

    def start(self, job: AnyJob, admitted: Sequence[AnyJob]) -> Start | None:
        """What a waiting job starts from; None: it waits for what a running one, or one that was
        just admitted, is about to reach."""
        ...

    def limit(self, job: AnyJob, num_held: int, chunk: int) -> int:
        """How many of a chunk's tokens are run before something is kept: all of them, or fewer."""
        ...

    def num_freed_by(self, job: AnyJob) -> int:
        """Pages that preempting a running job frees, at the least."""
        ...


@dataclass(frozen=True, slots=True)
class Schedule(Generic[JobT]):
    """What one step runs, and what comes before it.

    The sequences of the preempted are freed, then the admitted get a sequence each, then each row
    runs so many of its job's missing tokens: all of them, but for prompts' chunks. Without kept
    prefixes only the last row may be one.
    """

    preempted: Sequence[JobT]
    admitted: Sequence[JobT]
    rows: Sequence[tuple[JobT, int]]
    passed: Sequence[tuple[JobT, int]] = ()  # jobs left waiting, and by how many of the admitted
    starts: Sequence[Start] = ()  # of the admitted


class Scheduler(Generic[JobT]):
    """Two queues in order of arrival: the jobs that wait, and those that hold a sequence.

    Args:
        max_tokens: the most new tokens in one step.
        page_size: tokens in a page.
        max_passes: how many later jobs may be admitted before one that waits for pages.
        starts: prefixes that are kept; None: every job starts from nothing.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        page_size: int,
        max_passes: int = MAX_PASSES,
        starts: Starts[JobT] | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        self.page_size = page_size
        self.max_passes = max_passes
        self._starts = starts
        self.waiting: deque[JobT] = deque()
        self.running: list[JobT] = []

    def add(self, job: JobT) -> None:
        """Put a job at the end of the queue."""
        self.waiting.append(job)

    def __contains__(self, job: JobT) -> bool:
        return job in self.running or job in self.waiting

    def discard(self, job: JobT) -> None:
        """Forget a job, wherever it is."""
        for queue in (self.running, self.waiting):
            if job in queue:
                queue.remove(job)

    def restart(self) -> None:
        """Make every job wait again, in the same order: none holds anything any more."""
        self.waiting = deque(dict.fromkeys([*self.running, *self.waiting]))
        self.running = []

    def schedule(self, *, free_slots: int, free_pages: int) -> Schedule[JobT]:
        """Choose the rows of the next step and move the jobs between the queues accordingly.

        Args:
            free_slots: sequences that can still be made.
            free_pages: pages that no sequence holds.
        """
        chosen = self.choose(free_slots=free_slots, free_pages=free_pages)
        self.begin(chosen)
        return chosen

    def choose(self, *, free_slots: int, free_pages: int) -> Schedule[JobT]:
        """Choose the rows of the next step; nothing changes until it is begun."""
        rows: list[tuple[JobT, int]] = []
        budget = self.max_tokens
        num_kept = len(self.running)
        for index, job in enumerate(self.running):
            if index == num_kept or not budget:
                break
            chunk = self._chunk(job, job.num_held, budget)
            growth = self._growth(job, chunk)
            while growth > free_pages and index + 1 < num_kept:
                num_kept -= 1
                free_pages += self._num_freed_by(self.running[num_kept])
            if growth > free_pages:  # the latest admitted has nobody to take pages from
                chunk = self._room(job, free_pages)
                growth = free_pages
            if chunk:
                rows.append((job, chunk))
                budget -= chunk
                free_pages -= growth
        if num_kept < len(self.running):
            return Schedule(self.running[num_kept:], (), rows)
        admitted, passed = self._admissible(free_slots, free_pages, budget)
        rows += [(job, chunk) for job, _, chunk in admitted]
        starts = [start for _, start, _ in admitted]
        return Schedule((), [job for job, _, _ in admitted], rows, passed, starts)

    def begin(self, chosen: Schedule[JobT]) -> None:
        """Move the jobs between the queues as what was just chosen says.

        The preempted return to the head of the queue, to be recomputed.
        """
        self.waiting.extendleft(reversed(chosen.preempted))
        del self.running[len(self.running) - len(chosen.preempted) :]
        for job in chosen.admitted:
            self.running.append(job)
            self.waiting.remove(job)
        for job, num_passes in chosen.passed:
            job.num_passes += num_passes

    def _admissible(
        self, free_slots: int, free_pages: int, budget: int
    ) -> tuple[list[tuple[JobT, Start, int]], list[tuple[JobT, int]]]:
        """Waiting jobs to start while there are slots, tokens and pages for their whole history,
        from where, and their tokens; and those that they pass, with how many of them do."""
        rows: list[tuple[JobT, Start, int]] = []
        left: list[tuple[JobT, int]] = []  # waiting for pages, and how many were admitted before
        for job in islice(self.waiting, free_slots + self.max_passes):
            if not budget or len(rows) == free_slots:
                break
            if any(j.num_passes + len(rows) - before >= self.max_passes for j, before in left):
                break
            start = FROM_NOTHING
            if self._starts is not None:
                found = self._starts.start(job, [job for job, _, _ in rows])
                if found is None:
                    continue
                start = found
            reserve = len(self.running) + len(rows)  # a page for each running job to grow into
            needed = self._num_pages(job.num_tokens)
            if needed - start.num_pages + reserve > free_pages and start.num_pages < 0:
                start = FROM_NOTHING
            if needed - start.num_pages + reserve > free_pages:
                left.append((job, len(rows)))
                continue
            chunk = self._chunk(job, start.num_tokens, budget)
            rows.append((job, start, chunk))
            budget -= chunk
            free_pages -= self._num_pages(start.num_tokens + chunk) - start.num_pages
        return rows, [(job, len(rows) - before) for job, before in left]

    def _chunk(self, job: JobT, num_held: int, budget: int) -> int:
        """Tokens of a job that holds so many to run in one step."""
        chunk = min(job.num_tokens - num_held, budget)
        return chunk if self._starts is None else self._starts.limit(job, num_held, chunk)

    def _num_freed_by(self, job: JobT) -> int:
        """Pages that are free when a running job is preempted."""
        if self._starts is None:
            return self._num_pages(job.num_held)
        return self._starts.num_freed_by(job)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _growth(self, job: Job, chunk: int) -> int:
        """Further pages that so many more tokens take."""
        size, held = self.page_size, job.num_held
        return held // -size - (held + chunk) // -size

    def _room(self, job: Job, free_pages: int) -> int:
        """Tokens that fit into a job's own pages and the free ones."""
        return (self._num_pages(job.num_held) + free_pages) * self.page_size - job.num_held
