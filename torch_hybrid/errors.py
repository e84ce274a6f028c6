"""The errors of the public boundary.

A caller's own mistake (a wrong shape, an unknown token) is a plain ``ValueError``.
"""

from __future__ import annotations


class UnsupportedError(NotImplementedError):
    """A request that no implementation can serve; the message lists each candidate's reasons."""


class PromptTooLongError(ValueError):
    """A prompt that leaves no room for a token after it.

    Args:
        message: what was expected and what came.
        num_tokens: length of the prompt.
    """

    def __init__(self, message: str, num_tokens: int) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens

    def __reduce__(self) -> tuple[type[PromptTooLongError], tuple[str, int]]:
        """Keep the length in copies, which other processes raise again."""
        return type(self), (str(self), self.num_tokens)


class CapacityError(RuntimeError):
    """A pool is full; the message says what was asked, what is free and what raises the limit."""
