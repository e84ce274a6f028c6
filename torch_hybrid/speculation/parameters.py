"""How an engine speculates: checked whole when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch_hybrid.speculation.drafter import Drafter
from torch_hybrid.speculation.ngram import Ngram


@dataclass(frozen=True, slots=True)
class Speculation:
    """Who drafts, and how much.

    Args:
        drafter: "ngram" looks the last tokens up in the prompt and the output; or an object with
            the methods of a ``Drafter``.
        max_tokens: the most drafts of a request in one step; the runner's ``max_drafts`` must hold
            them.
        adapts: try fewer drafts, down to none, where measured acceptance and step times say that
            more do not pay. Without, as many as are proposed.

    Raises:
        TypeError: ``drafter`` is of another kind.
        ValueError: a value is out of its range.
    """

    drafter: Literal["ngram"] | Drafter = "ngram"
    max_tokens: int = 4
    adapts: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if isinstance(self.drafter, str):
            if self.drafter != "ngram":
                raise ValueError(f"drafter must be 'ngram' or a Drafter, got {self.drafter!r}")
        elif not isinstance(self.drafter, Drafter):
            raise TypeError(f"drafter must be 'ngram' or a Drafter, got {self.drafter!r}")

    def make_drafter(self) -> Drafter:
        """The drafter of one engine."""
        return Ngram() if isinstance(self.drafter, str) else self.drafter
