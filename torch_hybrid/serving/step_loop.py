"""Step loop of an engine: each step is scheduled, started, finished, and ended requests are freed.

A step frees preempted requests and gives sequences to admitted ones. It runs one ragged batch of
decodes and prompt chunks, and samples a token for each request whose history is complete. Where the
engine runs ahead, the next step starts before this one's tokens are known (``in_flight``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_hybrid.errors import CapacityError
from torch_hybrid.serving.in_flight import InFlight, Rows, launch, may_launch, run
from torch_hybrid.serving.prefix_cache import Prefixes
from torch_hybrid.serving.request import FinishReason, Request, TokenEvent
from torch_hybrid.serving.scheduler import Schedule, Scheduler
from torch_hybrid.serving.speculation import Speculator

if TYPE_CHECKING:
    from torch_hybrid.graphs.runner import Runner


@dataclass(eq=False)
class StepLoop:
    """Loop over the steps of a scheduler's requests; its caller holds the runner's lock."""

    runner: Runner  # holds the sequences
    scheduler: Scheduler[Request]  # chooses the rows of each step
    prefixes: Prefixes | None  # the prefix cache, if any
    speculator: Speculator | None  # drafts tokens; None without speculation
    runs_ahead: bool  # whether a step starts before the tokens of the previous step are known

    def __post_init__(self) -> None:
        self._flights: deque[InFlight] = deque()
        self._late_events: list[TokenEvent] = []  # of requests that ended outside of a step
        self.num_steps = self.num_tokens = self.num_preemptions = 0

    @property
    def has_unfinished(self) -> bool:
        """True if a step would do any work."""
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.waiting or self._flights or self._late_events)

    def take_late_events(self) -> list[TokenEvent]:
        """Take the events of requests that ended outside of a step, once."""
        late, self._late_events = self._late_events, []
        return late

    def end_outside(self, requests: Sequence[Request], reason: FinishReason) -> None:
        """End requests outside of a step; the next step returns their events."""
        self._late_events += [request.end(reason) for request in requests]
        self.retire(requests)

    def advance(self) -> list[TokenEvent]:
        """Start the next step unless it is under way, and the one after it; finish the first."""
        speculator = self.speculator
        began = 0.0 if speculator is None else speculator.clock()
        if not self._flights:
            rows = self._prepare()
            if not rows:
                return []
            self._note_start(self._start(rows))
        flight = self._flights[0]
        if flight.was_launched and (rows := self._prepare_ahead()):
            self._note_start(launch(self.runner, rows))
        events = self._finish(flight)
        if speculator is not None:
            speculator.note(flight, speculator.clock() - began)
        return events

    def _start(self, rows: Rows) -> InFlight:
        """Start a step: verify drafts, run ahead of the host, or wait for its logits."""
        drafts = None if self.speculator is None else self.speculator.drafts(rows)
        if drafts is None and self._may_launch(rows):
            return launch(self.runner, rows)
        return run(self.runner, rows, drafts)

    def _may_launch(self, rows: Rows) -> bool:
        """Tell whether the next step can start before the host knows the tokens of this one."""
        if not (self.runs_ahead and may_launch(rows)):
            return False
        return self.speculator is None or not self.speculator.may_draft(rows)

    def _note_start(self, flight: InFlight) -> None:
        """Record a started step, and take its snapshots before the next one starts."""
        self._flights.append(flight)
        self.num_steps += 1
        if self.prefixes is not None:
            self.prefixes.run(flight.requests)

    def _finish(self, flight: InFlight) -> list[TokenEvent]:
        """Finish the oldest step under way, and free ended requests that the next one does not
        use."""
        events = flight.finish()
        self.num_tokens += sum(event.token is not None for event in events)
        if self.prefixes is not None:
            self.prefixes.finish(flight.sampled)
        self.retire(flight.ended, landed=flight)
        self._flights.popleft()
        return events

    def finish_all(self) -> None:
        """Finish all steps under way, and free ended requests that were kept for those steps."""
        while self._flights:
            self._late_events += self._finish(self._flights[0])

    def _prepare(self) -> Rows:
        """Choose the rows of a step and give each a sequence; free preempted requests."""
        runner, scheduler = self.runner, self.scheduler
        chosen = scheduler.schedule(free_slots=runner.free_slots, free_pages=runner.free_pages)
        self._preempt(chosen.preempted)
        self._admit(chosen)
        if not chosen.rows and (scheduler.running or scheduler.waiting):
            request = [*scheduler.running, *scheduler.waiting][0]
            raise CapacityError(
                f"a request of {request.num_tokens} tokens needs a slot and "
                f"{-(-request.num_tokens // runner.page_size)} pages, its own included; "
                f"{runner.free_slots} slots and {runner.free_pages} pages are free, and the "
                f"others are held outside of the engine"
            )
        return self._with_images(chosen.rows)

    def _prepare_ahead(self) -> Rows:
        """Choose the rows of a step that starts before the tokens of the previous one are known.

        No rows mean that the step must wait: a request would be preempted, or needs the host.
        """
        runner, scheduler = self.runner, self.scheduler
        chosen = scheduler.choose(free_slots=runner.free_slots, free_pages=runner.free_pages)
        if chosen.preempted or not self._may_launch(chosen.rows):
            return ()
        scheduler.begin(chosen)
        self._admit(chosen)
        return self._with_images(chosen.rows)

    def _with_images(self, rows: Rows) -> Rows:
        """Load the images of a step's rows; an error of the tower ends its request alone."""
        if all(request.images is None for request, _ in rows):
            return rows
        kept = []
        for request, num_new in rows:
            error = request.load_images(num_new)
            if error is None:
                kept.append((request, num_new))
            else:
                self._late_events.append(request.end("error", error=error))
                self.retire([request])
        return kept

    def _admit(self, chosen: Schedule[Request]) -> None:
        if self.prefixes is not None:
            self.prefixes.begin(chosen.admitted, chosen.starts)
            return
        for request in chosen.admitted:
            (request.sequence,) = self.runner.new_sequences(1, adapter=request.adapter_name)

    def _preempt(self, requests: Sequence[Request]) -> None:
        """Free preempted requests, which wait again; the prefix cache may keep snapshots."""
        self.num_preemptions += len(requests)
        for request in requests:
            if self.prefixes is not None:
                self.prefixes.leave(request)
                self.prefixes.wait_again(request)
        self._free(requests)

    def retire(self, requests: Sequence[Request], *, landed: InFlight | None = None) -> None:
        """Forget ended requests, and free the sequences that no step under way uses."""
        flights = [flight for flight in self._flights if flight is not landed]
        under_way = {request for flight in flights for request in flight.requests}
        done = [request for request in requests if request not in under_way]
        if self.prefixes is not None:
            for request in done:
                self.prefixes.leave(request)
                self.prefixes.discard(request)
        self._free(done)
        self._forget(requests)

    def _forget(self, requests: Sequence[Request]) -> None:
        """Forget ended requests in the queues and in the drafter."""
        for request in requests:
            self.scheduler.discard(request)
            if self.speculator is not None:
                self.speculator.forget(request)

    def restart(self) -> None:
        """Free every sequence after an exception; unfinished requests wait to be recomputed."""
        flying = [request for flight in self._flights for request in flight.requests]
        requests = [*self.scheduler.running, *self.scheduler.waiting, *flying]
        for request in {*self.scheduler.running, *flying}:
            request.num_restarts += 1
        try:
            self.runner.wait()  # steps under way still write into their sequences
        finally:
            self._flights.clear()
            self._free(list(dict.fromkeys(requests)))
            for request in requests:
                request.num_in_flight = 0  # their tokens are sampled again
                if self.prefixes is not None:
                    self.prefixes.give_up(request)
            self.scheduler.restart()
            self._forget([request for request in requests if request.output is not None])

    def _free(self, requests: Sequence[Request]) -> None:
        sequences = [request.sequence for request in requests if request.sequence is not None]
        if sequences:
            self.runner.free(sequences)
        for request in requests:
            request.sequence = None
