"""Answer to a call: whole as JSON, or streamed as server-sent events, until the client leaves."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import time
from typing import Any, ClassVar

from starlette.responses import JSONResponse, Response
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
    """Form of the answer to one call.

    Args:
        call: the call.
        model: name of the model.
        tokenizer: decodes single tokens.
    """

    prefix: ClassVar[str]  # of ids

    def __init__(self, call: Call, model: str, tokenizer: Tokenizer) -> None:
        self.call, self._tokenizer = call, tokenizer
        self.head = {"id": f"{self.prefix}-{call.id}", "created": int(time()), "model": model}
        self.has_logprobs = call.requests[0].sampling.logprobs is not None
        self._num_told = [0] * len(call.requests)  # log-probabilities of each choice

    @abstractmethod
    def opening(self) -> list[Json]:
        """Make the chunks before the first piece."""

    @abstractmethod
    def piece(self, piece: Piece) -> Json:
        """Make the chunk of a piece."""

    @abstractmethod
    def chunk(self, *choices: Json) -> Json:
        """Make a chunk; the one that tells the usage has no choices."""

    @abstractmethod
    def whole(self) -> Json:
        """Make the whole answer, when all requests have ended."""

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


def usage(call: Call) -> Json:
    """Count the tokens of ended requests: of prompts once, of outputs for each sample."""
    num_prompt = sum(len(first.prompt) for first in call.firsts)
    num_output = 0 if call.is_empty else sum(len(request.tokens) for request in call.requests)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": call.num_cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(r.num_accepted_drafts for r in call.requests)
        },
    }


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
        serving = self._stream(send) if self._streams else self._send_whole(scope, receive, send)
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
        whole = self._form.whole() | {"usage": usage(self._call)}
        await JSONResponse(whole)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        is_open = False

        async def write(chunks: Sequence[Json]) -> None:
            body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
            await send({"type": "http.response.body", "body": body.encode(), "more_body": True})

        try:
            async for pieces in self._call.pieces():
                chunks = [] if is_open else self._form.opening()
                if not is_open:
                    is_open = True
                    start = {"type": "http.response.start", "status": 200, "headers": _EVENTS}
                    await send(start)
                await write(chunks + [self._form.piece(piece) for piece in pieces])
        except HttpError as error:
            if not is_open:
                raise
            await write([error.content])
        else:
            if self._shows_usage:
                await write([self._form.chunk() | {"usage": usage(self._call)}])
            await send(
                {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True}
            )
        await send({"type": "http.response.body", "body": b""})
