"""Guard in front of the app: checks the key, bounds the body, and gives each request an id."""

from __future__ import annotations

import asyncio
import hmac
import re
from hashlib import sha256
from uuid import uuid4

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torch_hybrid.http.errors import HttpError, refuse

OPEN_PATHS = ("/", "/health")  # need no key
DISCARD_S = 60.0  # longest time to read a body that is refused
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Guard:
    """ASGI middleware that hands the app ``state.body``, whole, and ``state.request_id``.

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
        request = Request(scope, receive)
        asked = request.headers.get("x-request-id", "")
        request_id = asked if _ID.fullmatch(asked) else uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        authorization = request.headers.get("authorization", "")
        is_known = scope["path"] in OPEN_PATHS or self._knows(authorization)
        try:
            body = await _read(request, self._max_body if is_known else 0)
        except (ClientDisconnect, TimeoutError):
            return
        if is_known and body is not None:
            request.state.body, request.state.request_id = body, request_id
            await self._app(scope, receive, send_with_id)
            return
        told = "the request bears no valid key: Authorization: Bearer KEY"
        error = HttpError(401, told, code="invalid_api_key")
        if is_known:
            error = HttpError(413, f"a body may have {self._max_body} bytes, and more came")
        await (await refuse(request, error))(scope, receive, send_with_id)

    def _knows(self, authorization: str) -> bool:
        if self._digest is None:
            return True
        kind, _, key = authorization.partition(" ")
        given = _digest(key.strip().encode("latin-1"))  # as ASGI servers decode headers
        return kind.lower() == "bearer" and hmac.compare_digest(given, self._digest)


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()  # of one length: a comparison does not tell the key's


async def _read(request: Request, limit: int) -> bytes | None:
    """Read a body; None if it is longer than the limit.

    Raises:
        ClientDisconnect: the client left.
        TimeoutError: a body that is too long does not end.
    """
    body = bytearray()
    async with asyncio.timeout(None) as discarding:
        async for chunk in request.stream():
            if discarding.when() is not None:
                continue
            body += chunk
            if len(body) > limit:
                body.clear()
                discarding.reschedule(asyncio.get_running_loop().time() + DISCARD_S)
    return bytes(body) if discarding.when() is None else None
