"""Call: the engine's requests of one HTTP request, and the inbox of their events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from torch_hybrid.http.errors import HttpError
from torch_hybrid.serving.request import FinishReason, Output, Request, TokenEvent


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
    _numbers: dict[Request, int] = field(init=False)
    _events: list[TokenEvent] = field(default_factory=list)
    _error: HttpError | None = None
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.requests = [sample for first in self.firsts for sample in first.samples]
        self._numbers = {request: number for number, request in enumerate(self.requests)}

    @property
    def outputs(self) -> list[Output]:
        """Outputs of the requests that have ended, in the order of choices."""
        return [request.output for request in self.requests if request.output is not None]

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens of the prompts that the prefix cache had."""
        return sum(first.num_cached_tokens or 0 for first in self.firsts)

    def put(self, event: TokenEvent) -> None:
        """Take an event; called in the event loop."""
        self._events.append(event)
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
        left = set(self.requests)
        await self._begin()
        while left:
            await self._arrived.wait()
            self._arrived.clear()
            if self._error is not None:
                raise self._error
            events, self._events = self._events, []
            pieces = _joined(events, self._numbers)
            left -= {event.request for event in events if event.output is not None}
            yield pieces

    async def _begin(self) -> None:
        """Wait for the first event, or until a request runs."""
        try:
            async with asyncio.timeout(self.max_wait_s):
                await self._arrived.wait()
        except TimeoutError as error:
            if all(request.sequence is None for request in self.requests):
                waited = f"the request has waited for {self.max_wait_s:g} s, and others still run"
                raise HttpError(503, waited, code="overloaded") from error


def _joined(events: Sequence[TokenEvent], numbers: dict[Request, int]) -> list[Piece]:
    """Join events to one piece for each request; an error of one of them ends the call.

    Raises:
        HttpError: a request ended with an error, or was cancelled.
    """
    grouped: dict[Request, list[TokenEvent]] = {}
    for event in events:
        grouped.setdefault(event.request, []).append(event)
        if event.output is not None and event.output.finish_reason == "error":
            raise HttpError(500, event.output.error or "the request failed")
        if event.output is not None and event.output.finish_reason == "cancelled":
            raise HttpError(503, "the server is stopping")
    return [
        Piece(
            choice=numbers[request],
            text="".join(event.text for event in own),
            num_tokens=sum(event.token is not None for event in own),
            end=None if own[-1].output is None else own[-1].output.finish_reason,
        )
        for request, own in grouped.items()
    ]
