"""What proposes drafts: an n-gram lookup, a model, or whatever has these two methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch_hybrid.serving.request import Request


@runtime_checkable
class Drafter(Protocol):
    """Guesses how histories go on. A wrong guess costs time and changes no token.

    It keeps what it likes of a request, by its identity. It is asked of requests whose last token
    alone was not run; histories only grow.
    """

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Up to so many tokens after the history of each request; none where nothing is likely."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended."""
        ...
