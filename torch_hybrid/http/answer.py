"""Answer to a call: whole as JSON, or streamed as server-sent events, until the client leaves."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from time import time
from typing import Any, ClassVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from torch_hybrid.http.call import Call, Piece
from torch_hybrid.http.errors import HttpError
from torch_hybrid.http.stepping import Stepper
from torch_hybrid.sampling import TokenLogprob
from torch_hybrid.serving.detokenizer import Tokenizer

Json = dict[str, Any]

_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies hand chunks on as they come
]


class Form(ABC):
    """Form of the answer to one call: what its choices are, whole and in chunks.

    Args:
        call: the call.
        model: name of the model.
        tokenizer: decodes single tokens.
    """

    prefix: ClassVar[str]  # of ids
    name: ClassVar[str]  # of whole answers
    chunk_name: ClassVar[str]

    def __init__(self, call: Call, model: str, tokenizer: Tokenizer) -> None:
        self.call, self._tokenizer = call, tokenizer
        self._head = {"id": f"{self.prefix}-{call.id}", "created": int(time()), "model": model}
        self.has_logprobs = call.requests[0].sampling.logprobs is not None
        self._num_told = [0] * len(call.requests)  # log-probabilities of each choice

    def opening(self) -> list[Json]:
        """Make the choices of chunks before the first piece."""
        return []

    @abstractmethod
    def choice(self, piece: Piece) -> Json:
        """Make the choice of a piece's chunk."""

    def whole_choice(self, piece: Piece) -> Json:
        """Make a choice of the whole answer, of its only piece."""
        return self.choice(piece)

    def chunk(self, *choices: Json) -> Json:
        """Make a chunk; the one that tells the usage has no choices."""
        return {**self._head, "object": self.chunk_name, "choices": choices}

    def whole(self) -> Json:
        """Make the whole answer, when all requests have ended."""
        choices = [self.whole_choice(piece) for piece in self.call.whole()]
        return {**self._head, "object": self.name, "choices": choices, "usage": self.call.usage}

    def next_logprobs(self, choice: int, count: int) -> list[TokenLogprob] | None:
        """Take the log-probabilities of a choice's next tokens; None where none are asked for."""
        if not self.has_logprobs:
            return None
        start = self._num_told[choice]
        self._num_told[choice] += count
        return self.call.requests[choice].logprobs[start : start + count]

    def text_of(self, *tokens: int) -> str:
        """Decode tokens; special ones have their texts."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)


class Answer(Response):
    """Response that reads a call and leaves it at the end, however that comes.

    Args:
        form: makes JSON of the call.
        stepper: queues the call.
        streams: whether pieces are sent as they come.
        shows_usage: whether a stream's last chunk tells its usage.
    """

    def __init__(self, form: Form, stepper: Stepper, *, streams: bool, shows_usage: bool) -> None:
        super().__init__()
        self._call, self._form, self._stepper = form.call, form, stepper
        self._streams, self._shows_usage = streams, shows_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the call; an error before the first piece has a status of its own."""
        self._stepper.open(self._call)
        serving = (
            self._send_events(send) if self._streams else self._send_whole(scope, receive, send)
        )
        work = asyncio.ensure_future(serving)
        gone = asyncio.ensure_future(receive())  # the body was read: only the end can come
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            gone.cancel()
            self._stepper.leave(self._call)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for _ in self._call.pieces():
            pass
        whole = Response(_json(self._form.whole()), media_type="application/json")
        await whole(scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        """Send events; an error after the first one is the last."""
        form, is_open, last = self._form, False, b"data: [DONE]\n\n"
        try:
            async for pieces in self._call.pieces():
                choices = [] if is_open else form.opening()
                choices += map(form.choice, pieces)
                body = b"".join([_event(form.chunk(choice)) for choice in choices])
                if not is_open:
                    is_open = True
                    await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except HttpError as error:
            if not is_open:
                raise
            last = _event(error.content)
        else:
            if self._shows_usage:
                last = _event(form.chunk() | {"usage": self._call.usage}) + last
        await send({"type": "http.response.body", "body": last})


def _event(content: object) -> bytes:
    return b"data: %b\n\n" % _json(content)


def _json(content: object) -> bytes:
    return to_json(content, inf_nan_mode="null")  # log-probabilities may be -inf
