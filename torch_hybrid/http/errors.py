"""Errors of the HTTP API: OpenAI's error object with its status."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

_LATER = {"retry-after": "1"}  # seconds
_HEADERS = {401: {"www-authenticate": "Bearer"}, 429: _LATER, 503: _LATER}
_KINDS = {401: "authentication_error", 429: "rate_limit_exceeded"}


class HttpError(HTTPException):
    """Refusal of an HTTP request.

    Args:
        status: HTTP status; for 429 and 503 clients are told when to come again.
        message: what was expected and what came.
        param: name of the field that is wrong.
        code: OpenAI's word for the error, which clients compare.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(status, message, _HEADERS.get(status))
        self.param, self.code = param, code

    def __str__(self) -> str:
        return self.detail

    @property
    def content(self) -> dict[str, object]:
        """OpenAI's error object."""
        other = "server_error" if self.status_code >= 500 else "invalid_request_error"
        about = {"type": _KINDS.get(self.status_code, other), "param": self.param}
        return {"error": {"message": self.detail, **about, "code": self.code}}


async def refuse(_: Request, error: Exception) -> JSONResponse:
    """Answer an error with OpenAI's object."""
    if not isinstance(error, HTTPException):
        error = HttpError(500, "Internal Server Error")
    told = error if isinstance(error, HttpError) else HttpError(error.status_code, error.detail)
    return JSONResponse(told.content, error.status_code, error.headers)
