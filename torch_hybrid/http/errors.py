"""Errors of the HTTP API: OpenAI's error object with its status."""

from __future__ import annotations

from starlette.responses import JSONResponse

RETRY_AFTER_S = 1


class HttpError(Exception):
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
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def content(self) -> dict[str, object]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": str(self),
                "type": _kind(self.status),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """Make the HTTP response."""
        headers = {"retry-after": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.content, self.status, headers=headers)


def _kind(status: int) -> str:
    if status >= 500:
        return "server_error"
    kinds = {401: "authentication_error", 429: "rate_limit_exceeded"}
    return kinds.get(status, "invalid_request_error")
