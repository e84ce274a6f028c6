"""Continuous batching on top of a runner: prompts in, tokens out.

A step ends what is late, frees what was preempted, gives sequences to what was admitted, runs one
ragged batch of decodes and prompt chunks, and samples a token for every request whose history is
complete. Where the engine runs ahead, the next step is started before that is waited for
(``flight``). Whatever raises in the middle, every page and slot comes back: requests that were
running wait again and are recomputed from their tokens. What one request raises (its own rules on
the logits, its text) ends that request alone.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, get_args, overload

from torch_hybrid.detokenizer import Tokenizer
from torch_hybrid.errors import CapacityError, UnsupportedError
from torch_hybrid.flight import Flight, Rows, launch, may_launch, run
from torch_hybrid.intake import Intake
from torch_hybrid.prefix_cache import PrefixCache, Prefixes
from torch_hybrid.prompts import Processor, Prompt, as_prompts
from torch_hybrid.request import FinishReason, Output, Request, TokenEvent
from torch_hybrid.sampling import GREEDY, Sampling
from torch_hybrid.scheduler import Schedule, Scheduler
from torch_hybrid.speculation import DraftCounts, Speculation, Speculator
from torch_hybrid.speculation.verified import Verified
from torch_hybrid.stats import EngineStats

if TYPE_CHECKING:
    from torch_hybrid.graphs.runner import Runner

RunAhead = Literal["auto", "on", "off"]


class Engine:
    """Serves many requests on one runner.

    Requests are served in order of arrival; one that waits for pages is passed by smaller ones, a
    bounded number of times (``scheduler.MAX_PASSES``). Several threads may submit, cancel and step:
    each call waits for the runner's lock, which a step holds from its schedule to its tokens.

    Args:
        runner: holds the sequences; others, and other engines, may hold some of its sequences too.
        tokenizer: lets prompts be texts and outputs have text; needed by stop texts.
        eos_token_ids: tokens that end every request which does not ignore them; by default those
            of the runner's model.
        max_waiting: the most requests that may wait for their first step; None is any number.
        run_ahead: "on" starts each step before the tokens of the one before it are known on the
            host, which then plans and keeps its books beside the device. Tokens are the same, but
            for what other company changes (see ``Runner``): a request that ends is in one more
            step, of which it gets nothing. Requests with rules on their logits or log-probabilities
            are waited for. "auto" is on where steps are captured in CUDA graphs.
        prefix_cache: keep what requests held, for those that begin with the same tokens: they run
            the rest alone. True is ``PrefixCache()``. States are kept in the runner's
            ``max_checkpoints``, keys in pages that no sequence needs. ``close`` gives them back.
        processor: the checkpoint's, of transformers: it makes tokens and pixels of conversations,
            whose messages may then have images, for a model that was loaded with ``vision=True``.
            Its tokenizer is taken where no other is given.
        speculate: have tokens drafted, and several of them verified in one step; the runner needs
            ``max_drafts``. Tokens are the same as without, but for what other company changes.
            Steps that may have drafts are waited for.

    Raises:
        TypeError: ``prefix_cache`` is of another kind.
        UnsupportedError: the runner serves decode steps alone.
        ValueError: ``max_waiting`` or ``run_ahead`` is none of its values, states are to be kept on
            a runner that has no checkpoints, or ``speculate`` asks for more drafts than it holds.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] | None = None,
        *,
        max_waiting: int | None = None,
        run_ahead: RunAhead = "auto",
        prefix_cache: bool | PrefixCache = False,
        processor: Processor | None = None,
        speculate: Speculation | None = None,
    ) -> None:
        if max_waiting is not None and max_waiting < 1:
            raise ValueError(f"max_waiting must be at least 1 or None, got {max_waiting}")
        if run_ahead not in get_args(RunAhead):
            raise ValueError(f"run_ahead must be 'auto', 'on' or 'off', got {run_ahead!r}")
        if not isinstance(prefix_cache, bool | PrefixCache):
            raise TypeError(
                f"prefix_cache must be True, False or a th.PrefixCache, got {prefix_cache!r}"
            )
        if not runner.prefill:
            raise UnsupportedError("an engine prefills prompts, got a runner with prefill=False")
        if tokenizer is None and processor is not None:
            tokenizer = processor.tokenizer
        self.runner = runner
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(
            runner.eos_token_ids if eos_token_ids is None else eos_token_ids
        )
        self.max_waiting = max_waiting
        self.runs_ahead = run_ahead == "on" or (run_ahead == "auto" and runner.captures)
        self._prefixes: Prefixes | None = None
        if prefix_cache:
            options = PrefixCache() if prefix_cache is True else prefix_cache
            self._prefixes = Prefixes(runner, options)
        self._speculator = None if speculate is None else Speculator(speculate, runner)
        self._intake = Intake(
            runner,
            tokenizer,
            self.eos_token_ids,
            processor=processor,
            finds_messages=bool(prefix_cache),
        )
        self._scheduler: Scheduler[Request] = Scheduler(
            max_tokens=runner.max_tokens, page_size=runner.page_size, starts=self._prefixes
        )
        # The oldest first; between steps at most one.
        self._flights: deque[Flight | Verified] = deque()
        self._lock = runner.lock
        self._next_deadline = math.inf  # of the requests that have one
        self._late_events: list[TokenEvent] = []  # of ends outside of a batch, for a step to return
        self._num_steps = self._num_tokens = 0
        self._seconds = 0.0

    @overload
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] = ...,
        *,
        stream: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> Iterator[Output]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] = ...,
        *,
        stream: Literal[True],
        timeout_s: float | None = ...,
    ) -> Iterator[TokenEvent]: ...

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        *,
        stream: bool = False,
        timeout_s: float | None = None,
    ) -> Iterator[Output] | Iterator[TokenEvent]:
        """Serve prompts together; yield each output as its request finishes.

        Leaving the loop early, Ctrl-C included, cancels what is unfinished and frees it.

        Args:
            prompts: one prompt or several: token lists or 1-D integer tensors; texts and
                conversations (lists of messages) when the engine has a tokenizer; or what a
                tokenizer returned for them. With a processor, parts of messages may be images
                (``{"type": "image", "image": ...}``: of Pillow, or a path); what a processor
                returned is a prompt too.
            sampling: for all prompts, or one for each.
            stream: yield an event for each token instead; a request's last one has its output.
            timeout_s: a request that has not ended after so many seconds ends with what it has;
                they count from the first iteration.

        Raises:
            TypeError: a prompt or ``sampling`` is of another kind; nothing has been started then.
            ValueError: a prompt cannot be served; nothing has been started then.
            CapacityError: while iterating: more requests than may wait, or sequences held
                elsewhere leave no room.
        """
        chosen = as_prompts(prompts)
        samplings = [sampling] * len(chosen) if not isinstance(sampling, Sequence) else sampling
        if len(samplings) != len(chosen):
            raise ValueError(f"sampling must have {len(chosen)} entries, got {len(samplings)}")
        _check_timeout(timeout_s)
        inbox: deque[TokenEvent] = deque()
        requests: list[Request] = []
        for index, (prompt, each) in enumerate(zip(chosen, samplings, strict=True)):
            try:
                requests += self._intake.requests(prompt, each, index=index, stream=stream)
            except (TypeError, ValueError) as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"prompt {index}: {error}") from error
        for request in requests:
            request.inbox = inbox
        events = self._serve(requests, inbox, timeout_s)
        return events if stream else _outputs(events)

    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling = GREEDY,
        *,
        stream: bool = False,
        timeout_s: float | None = None,
    ) -> Request:
        """Queue one prompt; ``step`` then brings its events and ``request.output`` its end.

        Args:
            prompt: as one of ``generate``.
            sampling: how its tokens are chosen and when it ends; for one output.
            stream: give events their text as it comes (costs a decode for each token).
            timeout_s: end it, with what it has, when so many seconds have passed.

        Raises:
            TypeError: the prompt or ``sampling`` is of another kind.
            ValueError: the prompt is empty, holds an unknown token or, with ``max_new_tokens``,
                is longer than a sequence can be; texts are used without a tokenizer; or several
                outputs are asked for.
            CapacityError: ``max_waiting`` requests wait already.
        """
        _check_timeout(timeout_s)
        requests = self._intake.requests(prompt, sampling, index=0, stream=stream)
        if len(requests) != 1:
            raise ValueError(f"submit serves one output, got n={sampling.n}: use generate")
        self._queue(requests, timeout_s)
        return requests[0]

    def cancel(self, request: Request) -> None:
        """End a request now, with the tokens it has. A finished one stays as it is.

        Raises:
            ValueError: the request is another engine's.
        """
        with self._lock:
            if request.output is not None:
                return
            if request not in self._scheduler:
                raise ValueError(f"request {request.index} is not one of this engine's")
            self._end_outside([request], "cancelled")

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        scheduler = self._scheduler
        return bool(scheduler.running or scheduler.waiting or self._flights or self._late_events)

    def step(self) -> list[TokenEvent]:
        """Run one batch and return what came of it; nothing to do is no event.

        Where the engine runs ahead, the next batch is under way when it returns. An exception
        leaves the engine usable: what was running waits to be recomputed.

        Raises:
            CapacityError: sequences held elsewhere leave no room for the oldest request.
        """
        with self._lock:
            begun = time.monotonic()
            try:
                self._end_late()
                events = self._advance()
            except BaseException:
                self._restart()
                raise
            self._seconds += time.monotonic() - begun
            late, self._late_events = self._late_events, []
            return late + events

    def stats(self) -> EngineStats:
        """What was served so far, what is waiting, and what the prefix cache and drafts did."""
        runner = self.runner
        with self._lock:
            return EngineStats(
                num_running=len(self._scheduler.running),
                num_waiting=len(self._scheduler.waiting),
                num_steps=self._num_steps,
                num_tokens=self._num_tokens,
                seconds=self._seconds,
                free_slots=runner.free_slots,
                free_pages=runner.free_pages,
                prefix_cache=None if self._prefixes is None else self._prefixes.stats,
                drafts=DraftCounts() if self._speculator is None else self._speculator.counts,
            )

    def save_prefixes(self, path: str | os.PathLike[str]) -> int:
        """Write what the prefix cache keeps to a file, for ``load_prefixes`` of another process.

        Where ranks share the model, each writes a file of its own.

        Returns:
            How many prefixes it has.

        Raises:
            ValueError: the engine keeps none.
            OSError: the file cannot be written.
        """
        with self._lock:
            return self._prefixes_for("save_prefixes").save(Path(path))

    def load_prefixes(self, path: str | os.PathLike[str]) -> int:
        """Keep the prefixes of a file on the host, as far as ``PrefixCache.host_bytes`` goes.

        Returns:
            How many are kept.

        Raises:
            ValueError: the engine keeps none; or the file is damaged, or of another model, page
                size or rank. Nothing is kept then.
            OSError: the file cannot be read.
        """
        with self._lock:
            return self._prefixes_for("load_prefixes").load(Path(path))

    def _prefixes_for(self, what: str) -> Prefixes:
        if self._prefixes is None:
            raise ValueError(f"{what} needs an engine with a prefix_cache")
        return self._prefixes

    def close(self) -> None:
        """Cancel everything that is unfinished, and free it and what the prefix cache keeps."""
        with self._lock:
            for request in [*self._scheduler.running, *self._scheduler.waiting]:
                self.cancel(request)
            self._land_all()
            if self._prefixes is not None:
                self._prefixes.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _queue(self, requests: Sequence[Request], timeout_s: float | None) -> None:
        """Let requests wait, all or none; their time begins."""
        with self._lock:
            num_waiting = len(self._scheduler.waiting) + len(requests)
            if self.max_waiting is not None and num_waiting > self.max_waiting:
                raise CapacityError(
                    f"{num_waiting - len(requests)} requests wait already and {len(requests)} more "
                    f"came: at most max_waiting = {self.max_waiting} may wait"
                )
            if timeout_s is not None:
                deadline = time.monotonic() + timeout_s
                self._next_deadline = min(self._next_deadline, deadline)
                for request in requests:
                    request.deadline = deadline
            for request in requests:
                self._scheduler.add(request)
                if self._prefixes is not None:
                    self._prefixes.add(request)

    def _serve(
        self, requests: list[Request], inbox: deque[TokenEvent], timeout_s: float | None
    ) -> Generator[TokenEvent]:
        """Queue the requests and step until each has ended."""
        num_unfinished = len(requests)
        try:
            self._queue(requests, timeout_s)
            while num_unfinished:
                while not inbox:
                    self.step()
                event = inbox.popleft()
                num_unfinished -= event.output is not None
                yield event
        finally:
            with self._lock:
                left = [request for request in requests if request.output is None]
                for request in left:
                    request.end("cancelled")
                self._retire(left)
                if not (self._scheduler.running or self._scheduler.waiting):
                    self._land_all()  # nobody else would

    def _end_late(self) -> None:
        """End the requests whose time is over."""
        now = time.monotonic()
        if now < self._next_deadline:
            return
        requests = (*self._scheduler.running, *self._scheduler.waiting)
        late = [request for request in requests if request.deadline <= now]
        self._end_outside(late, "timeout")
        self._next_deadline = min((r.deadline for r in requests if r not in late), default=math.inf)

    def _end_outside(self, requests: Sequence[Request], reason: FinishReason) -> None:
        """End requests outside of a batch; the next step returns their events."""
        self._late_events += [request.end(reason) for request in requests]
        self._retire(requests)

    def _advance(self) -> list[TokenEvent]:
        """Run the next batch, unless it is under way; start the one after it; land the first."""
        speculator = self._speculator
        began = 0.0 if speculator is None else speculator.clock()
        if not self._flights:
            rows = self._prepare()
            if not rows:
                return []
            self._note_start(self._start(rows))
        flight = self._flights[0]
        if flight.was_launched and (rows := self._prepare_ahead()):
            self._note_start(launch(self.runner, rows))
        events = self._land(flight)
        if speculator is not None:
            speculator.note(flight, speculator.clock() - began)
        return events

    def _start(self, rows: Rows) -> Flight | Verified:
        """Start a step: with drafts, ahead of the host, or waited for."""
        if self._speculator is not None and (verified := self._speculator.start(rows)):
            return verified
        return launch(self.runner, rows) if self._may_launch(rows) else run(self.runner, rows)

    def _may_launch(self, rows: Rows) -> bool:
        """Whether the host need not know what comes of a step to start the next one."""
        if not (self.runs_ahead and may_launch(rows)):
            return False
        return self._speculator is None or not self._speculator.may_draft(rows)

    def _note_start(self, flight: Flight | Verified) -> None:
        """Of a step that was started: what it leaves is kept before the next one starts."""
        self._flights.append(flight)
        self._num_steps += 1
        if self._prefixes is not None:
            self._prefixes.run(flight.requests)

    def _land(self, flight: Flight | Verified) -> list[TokenEvent]:
        """Wait for the oldest step under way; free what has ended, but for what the next one
        still uses."""
        events = flight.land()
        self._num_tokens += sum(event.token is not None for event in events)
        if self._prefixes is not None:
            self._prefixes.land(flight.sampled)
        self._retire(flight.ended, landed=flight)
        self._flights.popleft()
        return events

    def _land_all(self) -> None:
        """Wait for what is under way and free what was kept for it alone."""
        while self._flights:
            self._late_events += self._land(self._flights[0])

    def _prepare(self) -> Rows:
        """Choose the rows of a step and give each a sequence; free what was preempted."""
        runner, scheduler = self.runner, self._scheduler
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
        """The rows of the step after one whose tokens are not known; none where it must wait for
        them: something would be preempted, or a request needs the host."""
        runner, scheduler = self.runner, self._scheduler
        chosen = scheduler.choose(free_slots=runner.free_slots, free_pages=runner.free_pages)
        if chosen.preempted or not self._may_launch(chosen.rows):
            return ()
        scheduler.begin(chosen)
        self._admit(chosen)
        return self._with_images(chosen.rows)

    def _with_images(self, rows: Rows) -> Rows:
        """The rows of a step, when their images have been seen; what a tower raises ends its
        request alone."""
        if all(request.images is None for request, _ in rows):
            return rows
        kept = []
        for request, num_new in rows:
            error = request.load_images(num_new)
            if error is None:
                kept.append((request, num_new))
            else:
                self._late_events.append(request.end("error", error=error))
                self._retire([request])
        return kept

    def _admit(self, chosen: Schedule[Request]) -> None:
        if self._prefixes is not None:
            self._prefixes.begin(chosen.admitted, chosen.starts)
            return
        for request in chosen.admitted:
            (request.sequence,) = self.runner.new_sequences(1)

    def _preempt(self, requests: Sequence[Request]) -> None:
        """Free requests that wait again; what they held may be kept for them."""
        for request in requests:
            if self._prefixes is not None:
                self._prefixes.leave(request)
                self._prefixes.wait_again(request)
        self._free(requests)

    def _retire(
        self, requests: Sequence[Request], *, landed: Flight | Verified | None = None
    ) -> None:
        """Forget requests that have ended, and free what no step under way uses of them."""
        flights = [flight for flight in self._flights if flight is not landed]
        under_way = {request for flight in flights for request in flight.requests}
        done = [request for request in requests if request not in under_way]
        if self._prefixes is not None:
            for request in done:
                self._prefixes.leave(request)
                self._prefixes.discard(request)
        self._free(done)
        for request in requests:
            self._scheduler.discard(request)
            if self._speculator is not None:
                self._speculator.forget(request)

    def _restart(self) -> None:
        """After an exception: free every sequence; what has not ended waits to be recomputed."""
        flying = [request for flight in self._flights for request in flight.requests]
        requests = [*self._scheduler.running, *self._scheduler.waiting, *flying]
        try:
            self.runner.wait()  # what is under way still writes what is theirs
        finally:
            self._flights.clear()
            self._free(list(dict.fromkeys(requests)))
            for request in requests:
                request.expect_nothing()
                if request.output is not None:
                    self._scheduler.discard(request)
                if self._prefixes is not None:
                    self._prefixes.give_up(request)
            self._scheduler.restart()

    def _free(self, requests: Sequence[Request]) -> None:
        sequences = [request.sequence for request in requests if request.sequence is not None]
        if sequences:
            self.runner.free(sequences)
        for request in requests:
            request.sequence = None


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not (isinstance(timeout_s, Real) and timeout_s > 0):
        raise ValueError(f"timeout_s must be above 0 or None, got {timeout_s!r}")


def _outputs(events: Generator[TokenEvent]) -> Iterator[Output]:
    with closing(events):
        for event in events:
            if event.output is not None:
                yield event.output
