"""What a user says about an engine's prefix cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCache:
    """How an engine keeps prefixes; ``Runner(max_checkpoints=...)`` says how many states it can.

    Args:
        min_tokens: the fewest tokens that a checkpoint has to save over the one before it.
        every: of a prompt, keep the states after each so many tokens too, so that one that parts
            from it anywhere finds one near. By default they are kept where prompts end, where
            messages do, where two prompts part and where answers end.

    Raises:
        ValueError: ``min_tokens`` is below 1, or ``every`` below ``min_tokens``.
    """

    min_tokens: int = 64
    every: int | None = None

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens must be at least 1, got {self.min_tokens}")
        if self.every is not None and self.every < self.min_tokens:
            raise ValueError(
                f"every must be at least min_tokens, now {self.min_tokens}, got {self.every}"
            )
