"""Interface of drafters: an n-gram lookup, a model, or any object with these two methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch_hybrid.serving.request import Request


@runtime_checkable
class Drafter(Protocol):
    """Source of drafts: a wrong guess costs time and changes no token.

    A drafter may keep data per request, by its identity. Its requests lack only their last token in
    the runner; histories only grow.
    """

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]:
        """Draft up to ``counts[i]`` tokens after each history; none where none is likely."""
        ...

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        ...
