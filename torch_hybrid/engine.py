"""Continuous batching on top of ``Runner.extend``: prompts in, tokens out.

A step frees what was preempted, gives sequences to what was admitted, runs one ragged batch of
decodes and prompt chunks, and samples a token for every request whose history is complete.
Whatever raises in the middle, every page and slot comes back: requests that were running wait
again and are recomputed from their tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import index as index_of
from types import TracebackType
from typing import TYPE_CHECKING, Literal, overload

import torch

from torch_hybrid.detokenizer import Detokenizer, Tokenizer
from torch_hybrid.errors import CapacityError, UnsupportedError
from torch_hybrid.sampling import GREEDY, NOT_FINITE, Sampling, sample
from torch_hybrid.scheduler import Job, Scheduler

if TYPE_CHECKING:
    from torch_hybrid.caches.hybrid import Sequence as HeldSequence
    from torch_hybrid.graphs.runner import Runner

FinishReason = Literal["length", "stop", "cancelled", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A finished request."""

    index: int  # which prompt of its call
    prompt: list[int]
    tokens: list[int]  # generated, a stop token at the end included
    text: str | None  # None without a tokenizer; ends before a stop text or stop token
    finish_reason: FinishReason
    error: str | None = None  # set when finish_reason is "error"


@dataclass(eq=False, slots=True, kw_only=True)
class Request(Job):
    """A prompt on its way; its fields are the engine's to change."""

    index: int
    prompt: list[int]
    sampling: Sampling
    stop_token_ids: frozenset[int]
    generator: torch.Generator | None
    detokenizer: Detokenizer | None
    history: list[int]  # prompt and generated tokens
    sequence: HeldSequence | None = None
    output: Output | None = None
    inbox: deque[TokenEvent] | None = None  # of the iterator that waits for this request

    @property
    def tokens(self) -> list[int]:
        """The tokens generated so far."""
        return self.history[len(self.prompt) :]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One more token of a request, or its end."""

    request: Request
    token: int | None  # None: the request ended without one
    text: str  # what became certain with it; the pieces add up to the output's text
    output: Output | None = None  # set by a request's last event


class Engine:
    """Serves many requests on one runner. Not thread-safe: one thread submits and steps.

    Args:
        runner: holds the sequences; others may hold some of its sequences too.
        tokenizer: lets prompts be texts and outputs have text; needed by stop texts.
        eos_token_ids: tokens that end every request which does not ignore them; by default those
            of the runner's model.

    Raises:
        UnsupportedError: the runner serves decode steps alone.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] | None = None,
    ) -> None:
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
        self._late_events: list[TokenEvent] = []  # of cancels, for the next step to return

    @overload
    def generate(
        self,
        prompts: Sequence[Sequence[int] | str],
        sampling: Sampling | Sequence[Sampling] = ...,
        *,
        stream: Literal[False] = ...,
    ) -> Iterator[Output]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Sequence[int] | str],
        sampling: Sampling | Sequence[Sampling] = ...,
        *,
        stream: Literal[True],
    ) -> Iterator[TokenEvent]: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int] | str],
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        *,
        stream: bool = False,
    ) -> Iterator[Output] | Iterator[TokenEvent]:
        """Serve prompts together; yield each output as its request finishes.

        Leaving the loop early, Ctrl-C included, cancels what is unfinished and frees it.

        Args:
            prompts: token lists, or texts when the engine has a tokenizer.
            sampling: for all prompts, or one for each.
            stream: yield an event for each token instead; a request's last one has its output.

        Raises:
            ValueError: a prompt cannot be served; nothing has been started then.
            CapacityError: while iterating: sequences held elsewhere leave no room.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list of prompts, got one text")
        samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
        if len(samplings) != len(prompts):
            raise ValueError(f"sampling must have {len(prompts)} entries, got {len(samplings)}")
        inbox: deque[TokenEvent] = deque()
        requests = []
        for index, (prompt, chosen) in enumerate(zip(prompts, samplings, strict=True)):
            try:
                request = self._make_request(prompt, chosen, index=index, stream=stream)
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
            request.inbox = inbox
            requests.append(request)
        events = self._serve(requests, inbox)
        return events if stream else _outputs(events)

    def submit(
        self, prompt: Sequence[int] | str, sampling: Sampling = GREEDY, *, stream: bool = False
    ) -> Request:
        """Queue one prompt; ``step`` then brings its events and ``request.output`` its end.

        Args:
            prompt: tokens, or a text when the engine has a tokenizer.
            sampling: how its tokens are chosen and when it ends.
            stream: give events their text as it comes (costs a decode for each token).

        Raises:
            ValueError: the prompt is empty, holds an unknown token or, with ``max_new_tokens``,
                is longer than a sequence can be; or texts are used without a tokenizer.
        """
        request = self._make_request(prompt, sampling, index=0, stream=stream)
        self._scheduler.add(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request now, with the tokens it has. A finished one stays as it is.

        Raises:
            ValueError: the request is another engine's.
        """
        if request.output is not None:
            return
        if request not in self._scheduler:
            raise ValueError(f"request {request.index} is not one of this engine's")
        event = self._end(request, "cancelled")
        self._late_events.append(event)
        self._retire([event])

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
        try:
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

    def _make_request(
        self, prompt: Sequence[int] | str, sampling: Sampling, *, index: int, stream: bool
    ) -> Request:
        tokens = self._encode(prompt) if isinstance(prompt, str) else [index_of(t) for t in prompt]
        self._check(tokens, sampling)
        detokenizer = None
        if self.tokenizer is not None and (stream or sampling.stop):
            detokenizer = Detokenizer(self.tokenizer, sampling.stop)
        eos = frozenset[int]() if sampling.ignore_eos else self.eos_token_ids
        return Request(
            index=index,
            prompt=tokens,
            sampling=sampling,
            stop_token_ids=eos.union(sampling.stop_token_ids),
            generator=sampling.make_generator(),
            detokenizer=detokenizer,
            history=tokens.copy(),
            num_tokens=len(tokens),
        )

    def _encode(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("a prompt must be tokens when the engine has no tokenizer, got a text")
        return self.tokenizer.encode(prompt)

    def _check(self, tokens: list[int], sampling: Sampling) -> None:
        runner = self.runner
        if not tokens:
            raise ValueError("the prompt must have at least 1 token, got 0")
        if min(tokens) < 0 or max(tokens) >= runner.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < runner.vocab_size)
            raise ValueError(f"token ids must be within 0 and {runner.vocab_size - 1}, got {wrong}")
        longest = len(tokens) + sampling.max_new_tokens - 1  # the last token is never held
        if longest > runner.max_seq_len:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and max_new_tokens={sampling.max_new_tokens} "
                f"hold up to {longest} tokens, and a sequence can hold {runner.max_seq_len}; "
                f"the runner's kv_tokens raises this"
            )
        if sampling.stop and self.tokenizer is None:
            raise ValueError(f"stop texts need a tokenizer, got stop={list(sampling.stop)!r}")

    def _serve(self, requests: list[Request], inbox: deque[TokenEvent]) -> Generator[TokenEvent]:
        """Queue the requests and step until each has ended."""
        num_unfinished = len(requests)
        try:
            for request in requests:
                self._scheduler.add(request)
            while num_unfinished:
                while not inbox:
                    self.step()
                event = inbox.popleft()
                num_unfinished -= event.output is not None
                yield event
        finally:
            left = [request for request in requests if request.output is None]
            self._retire([self._end(request, "cancelled") for request in left])

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
        logits = self.runner.extend(sequences, tokens, logits="last")
        for request, num_new in rows:
            request.num_held += num_new
        sampled = [request for request, _ in rows if request.num_held == request.num_tokens]
        drawn = sample(
            logits[: len(sampled)],  # only the last row of a schedule can be incomplete
            [request.sampling for request in sampled],
            [request.generator for request in sampled],
        )
        return [self._take(request, token) for request, token in zip(sampled, drawn, strict=True)]

    def _take(self, request: Request, token: int) -> TokenEvent:
        """Append a sampled token to its request, and end the request where that ends it."""
        if token == NOT_FINITE:
            error = f"the logits after {request.num_tokens} tokens have NaN or infinite values"
            return self._end(request, "error", error=error)
        request.history.append(token)
        request.num_tokens += 1
        text = ""
        if token in request.stop_token_ids:
            return self._end(request, "stop", token=token)
        if request.detokenizer is not None:
            text = request.detokenizer.add(token)
            if request.detokenizer.is_stopped:
                return self._end(request, "stop", token=token, text=text)
        if request.num_tokens - len(request.prompt) == request.sampling.max_new_tokens:
            return self._end(request, "length", token=token, text=text)
        event = TokenEvent(request, token, text)
        if request.inbox is not None:
            request.inbox.append(event)
        return event

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        token: int | None = None,
        text: str = "",
        error: str | None = None,
    ) -> TokenEvent:
        """Give a request its output. It holds its sequence until it is retired."""
        tokens = request.tokens
        whole: str | None = None
        if request.detokenizer is not None:
            text += request.detokenizer.finish()
            whole = request.detokenizer.text
        elif self.tokenizer is not None:
            shown = tokens[:-1] if token in request.stop_token_ids else tokens
            whole = self.tokenizer.decode(shown, skip_special_tokens=True)
        request.output = Output(
            index=request.index,
            prompt=request.prompt,
            tokens=tokens,
            text=whole,
            finish_reason=reason,
            error=error,
        )
        event = TokenEvent(request, token, text, request.output)
        if request.inbox is not None:
            request.inbox.append(event)
        return event

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


def _outputs(events: Generator[TokenEvent]) -> Iterator[Output]:
    with closing(events):
        for event in events:
            if event.output is not None:
                yield event.output
