"""Continuous batching on top of ``Runner.extend``: prompts in, tokens out.

A step ends what is late, frees what was preempted, gives sequences to what was admitted, runs one
ragged batch of decodes and prompt chunks, and samples a token for every request whose history is
complete. Whatever raises in the middle, every page and slot comes back: requests that were running
wait again and are recomputed from their tokens. What one request raises (its own rules on the
logits, its text) ends that request alone.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import accumulate
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from torch_hybrid.detokenizer import Detokenizer, Tokenizer
from torch_hybrid.errors import CapacityError, UnsupportedError
from torch_hybrid.prompts import Prompt, as_prompts, prompt_tokens
from torch_hybrid.request import FinishReason, Output, Request, TokenEvent
from torch_hybrid.sampling import GREEDY, LogitsRules, Sampling, sample
from torch_hybrid.scheduler import Scheduler

if TYPE_CHECKING:
    from torch_hybrid.caches.hybrid import Sequence as HeldSequence
    from torch_hybrid.graphs.runner import Runner


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

    Raises:
        UnsupportedError: the runner serves decode steps alone.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] | None = None,
        *,
        max_waiting: int | None = None,
    ) -> None:
        if max_waiting is not None and max_waiting < 1:
            raise ValueError(f"max_waiting must be at least 1 or None, got {max_waiting}")
        if not runner.prefill:
            raise UnsupportedError("an engine prefills prompts, got a runner with prefill=False")
        self.runner = runner
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(
            runner.eos_token_ids if eos_token_ids is None else eos_token_ids
        )
        self._scheduler: Scheduler[Request] = Scheduler(
            max_tokens=runner.max_tokens, page_size=runner.page_size
        )
        self.max_waiting = max_waiting
        self._lock = runner.lock
        self._next_deadline = math.inf  # of the requests that have one
        self._late_events: list[TokenEvent] = []  # of ends outside of a batch, for a step to return

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
                tokenizer returned for them.
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
                requests += self._make_requests(prompt, each, index=index, stream=stream)
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
        requests = self._make_requests(prompt, sampling, index=0, stream=stream)
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
        return bool(self._scheduler.running or self._scheduler.waiting or self._late_events)

    def step(self) -> list[TokenEvent]:
        """Run one batch and return what came of it; nothing to do is no event.

        An exception leaves the engine usable: what was running waits to be recomputed.

        Raises:
            CapacityError: sequences held elsewhere leave no room for the oldest request.
        """
        with self._lock:
            try:
                self._end_late()
                rows = self._prepare()
                events = self._run(rows) if rows else []
                self._retire(events)
            except BaseException:
                self._restart()
                raise
            late, self._late_events = self._late_events, []
            return late + events

    def close(self) -> None:
        """Cancel everything that is unfinished and free it."""
        with self._lock:
            for request in [*self._scheduler.running, *self._scheduler.waiting]:
                self.cancel(request)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _make_requests(
        self, prompt: Prompt, sampling: Sampling, *, index: int, stream: bool
    ) -> list[Request]:
        """A request for each of the ``sampling.n`` outputs of a prompt."""
        if not isinstance(sampling, Sampling):
            raise TypeError(f"sampling must be a th.Sampling, got {sampling!r}")
        tokens = prompt_tokens(prompt, self.tokenizer)
        self._check(tokens, sampling)
        eos = frozenset[int]() if sampling.ignore_eos else self.eos_token_ids
        ends = eos.union(sampling.stop_token_ids)
        barred = ends.intersection(range(self.runner.vocab_size))  # a config may name others
        tokenizer = self.tokenizer if stream or sampling.stop else None
        return [
            Request(
                index=index,
                sample=sample,
                prompt=tokens,
                sampling=sampling,
                stop_token_ids=ends,
                tokenizer=self.tokenizer,
                detokenizer=None if tokenizer is None else Detokenizer(tokenizer, sampling.stop),
                generator=sampling.make_generator(sample),
                rules=LogitsRules.of(sampling, num_prompt=len(tokens), end_token_ids=barred),
                history=tokens.copy(),
                num_tokens=len(tokens),
            )
            for sample in range(sampling.n)
        ]

    def _check(self, tokens: list[int], sampling: Sampling) -> None:
        runner = self.runner
        if not tokens:
            raise ValueError("the prompt must have at least 1 token, got 0")
        if min(tokens) < 0 or max(tokens) >= runner.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < runner.vocab_size)
            raise ValueError(f"token ids must be within 0 and {runner.vocab_size - 1}, got {wrong}")
        for name, ids in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", sampling.logit_bias),
        ):
            if max(ids, default=0) >= runner.vocab_size:
                raise ValueError(
                    f"{name} must be within 0 and {runner.vocab_size - 1}, got {max(ids)}"
                )
        longest = len(tokens) + sampling.max_new_tokens - 1  # the last token is never held
        if longest > runner.max_seq_len:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and max_new_tokens={sampling.max_new_tokens} "
                f"hold up to {longest} tokens, and a sequence can hold {runner.max_seq_len}; "
                f"the runner's kv_tokens raises this"
            )
        if sampling.stop and self.tokenizer is None:
            raise ValueError(f"stop texts need a tokenizer, got stop={list(sampling.stop)!r}")

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
                self._retire([request.end("cancelled") for request in left])

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
        events = [request.end(reason) for request in requests]
        self._late_events += events
        self._retire(events)

    def _prepare(self) -> list[tuple[Request, int]]:
        """Choose the rows of a step and give each a sequence; free what was preempted."""
        runner, scheduler = self.runner, self._scheduler
        chosen = scheduler.schedule(free_slots=runner.free_slots, free_pages=runner.free_pages)
        self._free(chosen.preempted)
        for request in chosen.admitted:
            (request.sequence,) = runner.new_sequences(1)
        if not chosen.rows and (scheduler.running or scheduler.waiting):
            request = [*scheduler.running, *scheduler.waiting][0]
            raise CapacityError(
                f"a request of {request.num_tokens} tokens needs a slot and "
                f"{-(-request.num_tokens // runner.page_size)} pages, its own included; "
                f"{runner.free_slots} slots and {runner.free_pages} pages are free, and the "
                f"others are held outside of the engine"
            )
        return list(chosen.rows)

    def _run(self, rows: list[tuple[Request, int]]) -> list[TokenEvent]:
        """Extend the rows' sequences and sample for those whose history is complete."""
        sequences: list[HeldSequence] = []
        tokens: list[list[int]] = []
        for request, num_new in rows:
            assert request.sequence is not None
            held = request.num_held
            sequences.append(request.sequence)
            tokens.append(request.history[held : held + num_new])
        logits = self._extend(rows, sequences, tokens)
        for request, num_new in rows:
            request.num_held += num_new
        sampled = [request for request, _ in rows if request.num_held == request.num_tokens]
        logits = logits[: len(sampled)]  # only the last row of a schedule can be incomplete
        drawn = sample(
            _ruled(logits, sampled),
            [request.sampling for request in sampled],
            [request.generator for request in sampled],
        )
        taken = enumerate(zip(sampled, drawn, strict=True))
        return [request.take(token, logits, row) for row, (request, token) in taken]

    def _extend(
        self,
        rows: Sequence[tuple[Request, int]],
        sequences: list[HeldSequence],
        tokens: list[list[int]],
    ) -> Tensor:
        """[N, vocab_size] logits after each row's tokens; prompts that ask note their own."""
        if not any(request.needs_prompt_logits for request, _ in rows):
            return self.runner.extend(sequences, tokens, logits="last")
        logits = self.runner.extend(sequences, tokens, logits="all")
        each = logits.split([num_new for _, num_new in rows])
        for (request, _), own in zip(rows, each, strict=True):
            request.note_prompt(own, first=request.num_held)
        last = [end - 1 for end in accumulate(num_new for _, num_new in rows)]
        return logits[last]

    def _retire(self, events: Sequence[TokenEvent]) -> None:
        """Free what the requests that ended hold, and forget them."""
        ended = [event.request for event in events if event.output is not None]
        self._free(ended)
        for request in ended:
            self._scheduler.discard(request)

    def _restart(self) -> None:
        """After an exception: free every sequence; what has not ended waits to be recomputed."""
        requests = [*self._scheduler.running, *self._scheduler.waiting]
        self._free(list(dict.fromkeys(requests)))
        for request in requests:
            if request.output is not None:
                self._scheduler.discard(request)
        self._scheduler.restart()

    def _free(self, requests: Sequence[Request]) -> None:
        sequences = [request.sequence for request in requests if request.sequence is not None]
        if sequences:
            self.runner.free(sequences)
        for request in requests:
            request.sequence = None


def _ruled(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """[N, vocab_size] logits by each request's own rules."""
    if all(request.rules is None for request in requests):
        return logits
    ruled = logits.float().clone()
    for row, request in zip(ruled, requests, strict=True):
        if request.rules is not None:
            row.copy_(request.ruled(row))
    return ruled


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not (isinstance(timeout_s, Real) and timeout_s > 0):
        raise ValueError(f"timeout_s must be above 0 or None, got {timeout_s!r}")


def _outputs(events: Generator[TokenEvent]) -> Iterator[Output]:
    with closing(events):
        for event in events:
            if event.output is not None:
                yield event.output
