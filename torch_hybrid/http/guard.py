"""Guard in front of the app: checks the key, bounds the body, and gives each request an id."""

from __future__ import annotations

import asyncio
import hmac
import re
from hashlib import sha256
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torch_hybrid.http.errors import HttpError

OPEN_PATHS = ("/", "/health")  # need no key
DISCARD_S = 60.0  # longest time to read a body that is refused
_ID = re.compile(rb"[\w.:-]{1,128}")


class Guard:
    """ASGI middleware that hands the app whole bodies of bounded size.

    A refused body is read to its end and forgotten: a client that still sends when its connection
    is closed never reads why.

    Args:
        app: the app behind it.
        api_key: key that requests must bear; None asks for none.
        max_body: most bytes of a body.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, max_body: int) -> None:
        self._app, self._max_body = app, max_body
        self._digest = None if api_key is None else _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        asked = headers.get(b"x-request-id", b"")
        request_id = asked if _ID.fullmatch(asked) else uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        is_known = scope["path"] in OPEN_PATHS or self._knows(headers.get(b"authorization", b""))
        try:
            body = await _read(receive, self._max_body if is_known else 0)
        except (ConnectionError, TimeoutError):
            return
        if is_known and body is not None:
            await self._app(scope, _once(body, receive), send_with_id)
            return
        error = HttpError(
            401, "the request bears no valid key: Authorization: Bearer KEY", code="invalid_api_key"
        )
        if is_known:
            error = HttpError(413, f"a body may have {self._max_body} bytes, and more came")
        await error.response()(scope, receive, send_with_id)

    def _knows(self, authorization: bytes) -> bool:
        if self._digest is None:
            return True
        kind, _, key = authorization.partition(b" ")
        return hmac.compare_digest(_digest(key.strip()), self._digest) and kind.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()  # of one length, so that a comparison does not tell the key's


async def _read(receive: Receive, limit: int) -> bytes | None:
    """Read a body; None if it is longer than the limit.

    Raises:
        ConnectionError: the client left.
        TimeoutError: a body that is too long does not end.
    """
    chunks: list[bytes] = []
    size, goes_on = 0, True
    async with asyncio.timeout(None) as discarding:
        while goes_on:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the client left")
            chunk, goes_on = message.get("body", b""), message.get("more_body", False)
            size += len(chunk)
            if size <= limit:
                chunks.append(chunk)
            elif chunks or discarding.when() is None:
                chunks.clear()
                discarding.reschedule(asyncio.get_running_loop().time() + DISCARD_S)
    return b"".join(chunks) if size <= limit else None


def _once(body: bytes, receive: Receive) -> Receive:
    """Make a ``receive`` that gives the whole body, and then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_once() -> Message:
        return messages.pop() if messages else await receive()

    return receive_once
