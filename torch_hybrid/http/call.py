"""Call: the engine's requests of one HTTP request, and the inbox of their events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_hybrid.http.errors import HttpError
from torch_hybrid.serving.request import FinishReason, Request, TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text and tokens that one choice got since the last piece."""

    choice: int
    text: str
    num_tokens: int
    end: FinishReason | None  # why the choice ended, with its last piece


@dataclass(eq=False, slots=True)
class Call:
    """Requests of one HTTP request, in the order of its choices; read in one event loop.

    Args:
        id: id of the HTTP request.
        firsts: a request for each prompt, whose samples are choices too.
        max_wait_s: longest time until one of them runs.
        is_empty: whether outputs are left out, as ``max_tokens: 0`` asks: one token is drawn.
    """

    id: str
    firsts: Sequence[Request]
    max_wait_s: float
    is_empty: bool = False
    requests: list[Request] = field(init=False)
    begun: float = field(default_factory=time.monotonic)
    last_token: dict[Request, float] = field(default_factory=dict)  # when it came
    first_token: float | None = None  # when it came
    _events: dict[Request, list[TokenEvent]] = field(default_factory=dict)
    _error: HttpError | None = None
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.requests = [sample for first in self.firsts for sample in first.samples]

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens of the prompts that the prefix cache had."""
        return sum(first.num_cached_tokens or 0 for first in self.firsts)

    @property
    def usage(self) -> dict[str, Any]:
        """Counts of tokens: of prompts once, of outputs for each sample."""
        num_prompt = sum(len(first.prompt) for first in self.firsts)
        num_output = 0 if self.is_empty else sum(len(each.tokens) for each in self.requests)
        num_accepted = sum(request.num_accepted_drafts for request in self.requests)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"accepted_prediction_tokens": num_accepted},
        }

    def put(self, request: Request, events: Sequence[TokenEvent]) -> None:
        """Take events of one request; called in the event loop."""
        self._events.setdefault(request, []).extend(events)
        self._arrived.set()

    def fail(self, error: HttpError) -> None:
        """End the call with an error; called in the event loop."""
        self._error = error
        self._arrived.set()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Yield what came since the last time, a piece for each choice that got something.

        Raises:
            HttpError: the call fails; no request of it runs for ``max_wait_s`` seconds.
        """
        left = len(self.requests)
        await self._begin()
        while left:
            await self._arrived.wait()
            self._arrived.clear()
            if self._error is not None:
                raise self._error
            events, self._events = self._events, {}
            pieces = [self._piece(n, events[r]) for n, r in enumerate(self.requests) if r in events]
            left -= sum(piece.end is not None for piece in pieces)
            yield pieces

    def whole(self) -> Iterator[Piece]:
        """Yield one piece for each request, when all have ended."""
        for choice, output in enumerate(request.output for request in self.requests):
            if output is not None:
                text = "" if self.is_empty else output.text or ""
                num_tokens = 0 if self.is_empty else len(output.tokens)
                end = output.finish_reason
                yield Piece(choice=choice, text=text, num_tokens=num_tokens, end=end)

    async def _begin(self) -> None:
        """Wait for the first event, or until a request runs."""
        try:
            async with asyncio.timeout(self.max_wait_s):
                await self._arrived.wait()
        except TimeoutError as error:
            if all(request.sequence is None for request in self.requests):
                waited = f"the request has waited for {self.max_wait_s:g} s, and others still run"
                raise HttpError(503, waited, code="overloaded") from error

    def _piece(self, choice: int, events: Sequence[TokenEvent]) -> Piece:
        """Join the events of one choice.

        Raises:
            HttpError: it ended with an error, or was cancelled.
        """
        output = events[-1].output
        end = None if output is None else output.finish_reason
        if output is not None and end == "error":
            raise HttpError(500, output.error or "the request failed")
        if end == "cancelled":
            raise HttpError(503, "the server is stopping")
        if self.is_empty:
            return Piece(choice=choice, text="", num_tokens=0, end=end)
        text = "".join([event.text for event in events])
        num_tokens = sum(event.token is not None for event in events)
        return Piece(choice=choice, text=text, num_tokens=num_tokens, end=end)
