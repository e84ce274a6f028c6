"""Scheduler: chooses the tokens of the next step; continuous batching as arithmetic on counts.

Contract: a step never holds more tokens than the budget. It never asks for a page or a slot that is
not free, and names a job at most once. Jobs are served in order of arrival, but smaller jobs may
pass those that wait for pages. A waiting job is passed at most ``MAX_PASSES`` times in its life,
and the first running job always progresses, so none starves. The scheduler knows no tensor and no
model.

    for each running job, oldest first:       (decodes come before the one unfinished prompt)
        take its missing tokens, within the budget
        out of pages: preempt the latest admitted job, which is recomputed later
    for each waiting job, oldest first, while slots and some budget are left:
        pages for its whole history are free: admit it; it passes those that were left waiting
        else leave it waiting; nobody passes it if it was passed often enough

With a prefix cache (``Starts``), a job starts from a kept prefix and takes fewer tokens and pages.
It waits while a running job is about to reach a longer common prefix. Chunks end where a snapshot
is wanted.
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

    A job decodes when one token is missing. With more missing tokens it has a prompt to prefill;
    with none it waits for its last token.

    Attributes:
        num_passes: number of later jobs that were admitted before it.
    """

    num_passes: int

    @property
    def num_tokens(self) -> int:
        """Length of its history: prompt and generated tokens, those under way included."""
        ...

    @property
    def num_held(self) -> int:
        """Number of those tokens that the runner holds; 0 while the job waits."""
        ...


JobT = TypeVar("JobT", bound=Job)
AnyJob = TypeVar("AnyJob", bound=Job, contravariant=True)


@dataclass(frozen=True, slots=True)
class Start:
    """Prefix that an admitted job starts from; empty by default.

    ``num_pages`` is the number of free pages that the prefix saves. It can be negative: the last
    page is copied, and both copies may count.
    """

    num_tokens: int = 0
    num_pages: int = 0
    snapshot: Snapshot | None = None


FROM_NOTHING = Start()


class Starts(Protocol[AnyJob]):
    """Interface of a prefix cache, as the scheduler sees it."""

    def start(self, job: AnyJob, admitted: Sequence[AnyJob]) -> Start | None:
        """Choose the prefix that a waiting job starts from.

        None: the job waits, because a running or just admitted job is about to reach a longer one.
        """
        ...

    def limit(self, job: AnyJob, num_held: int, chunk: int) -> int:
        """Cut a chunk where a snapshot is wanted; return its number of tokens."""
        ...

    def num_freed_by(self, job: AnyJob) -> int:
        """Count the pages that preempting a running job frees, at the least."""
        ...


@dataclass(frozen=True, slots=True)
class Schedule(Generic[JobT]):
    """Plan of one step: the jobs to preempt, the jobs to admit, and the rows to run.

    First the sequences of preempted jobs are freed, then each admitted job gets a sequence. Then
    each row runs all missing tokens of its job, or a chunk of its prompt. Without a prefix cache
    only the last row may be such a chunk.
    """

    preempted: Sequence[JobT]
    admitted: Sequence[JobT]
    rows: Sequence[tuple[JobT, int]]
    passed: Sequence[tuple[JobT, int]] = ()  # jobs that were passed, and how often
    starts: Sequence[Start] = ()  # of the admitted jobs


@dataclass(eq=False)
class Scheduler(Generic[JobT]):
    """Two queues in order of arrival: waiting jobs, and running jobs that hold a sequence."""

    max_tokens: int  # the most new tokens in one step
    page_size: int  # tokens in a page
    # how many later jobs may be admitted before one that waits for pages
    max_passes: int = MAX_PASSES
    starts: Starts[JobT] | None = None  # the prefix cache; None: every job starts from nothing

    def __post_init__(self) -> None:
        self.waiting: deque[JobT] = deque()
        self.running: list[JobT] = []

    def add(self, job: JobT) -> None:
        """Put a job at the end of the queue."""
        self.waiting.append(job)

    def __contains__(self, job: JobT) -> bool:
        return job in self.running or job in self.waiting

    def discard(self, job: JobT) -> None:
        """Forget a job, in whichever queue it is."""
        for queue in (self.running, self.waiting):
            if job in queue:
                queue.remove(job)

    def restart(self) -> None:
        """Move every job to the waiting queue, in the same order; no job holds a sequence."""
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
        """Choose the rows of the next step; the queues change only in ``begin``."""
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
            if growth > free_pages:  # no later job is left to preempt
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
        """Move the jobs between the queues by the schedule that ``choose`` just returned.

        Preempted jobs return to the head of the queue, to be recomputed.
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
        """Choose waiting jobs to admit, while slots, budget and pages for their histories are left.

        Returns:
            The admitted jobs, each with its start and its number of tokens in this step.
            The jobs that they pass, each with the number of jobs that pass it.
        """
        rows: list[tuple[JobT, Start, int]] = []
        left: list[tuple[JobT, int]] = []  # waits for pages; jobs admitted before it
        for job in islice(self.waiting, free_slots + self.max_passes):
            if not budget or len(rows) == free_slots:
                break
            if any(j.num_passes + len(rows) - before >= self.max_passes for j, before in left):
                break
            start = FROM_NOTHING
            if self.starts is not None:
                found = self.starts.start(job, [job for job, _, _ in rows])
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
        """Count the tokens of a job to run in one step, after those that it holds."""
        chunk = min(job.num_tokens - num_held, budget)
        return chunk if self.starts is None else self.starts.limit(job, num_held, chunk)

    def _num_freed_by(self, job: JobT) -> int:
        """Count the pages that preempting a running job frees."""
        if self.starts is None:
            return self._num_pages(job.num_held)
        return self.starts.num_freed_by(job)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _growth(self, job: Job, chunk: int) -> int:
        """Count the additional pages that a job needs for ``chunk`` more tokens."""
        size, held = self.page_size, job.num_held
        return held // -size - (held + chunk) // -size

    def _room(self, job: Job, free_pages: int) -> int:
        """Count the tokens that fit into a job's own pages and the free pages."""
        return (self._num_pages(job.num_held) + free_pages) * self.page_size - job.num_held
