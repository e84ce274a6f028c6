"""What a user says about an engine's prefix cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCache:
    """How an engine keeps prefixes; ``Runner(max_snapshots=...)`` says how many states it can.

    Args:
        min_tokens: the fewest tokens that a snapshot has to save over the one before it.
        every: of a prompt, keep the states after each so many tokens too, so that one that parts
            from it anywhere finds one near. By default they are kept where prompts end, where
            messages do, where two prompts part and where answers end.
        host_bytes: memory of the host (pinned, for a GPU) for what has to make room on the device;
            it comes back when a request can start from it.

    Raises:
        ValueError: ``min_tokens`` is below 1, ``every`` below ``min_tokens``, or ``host_bytes``
            below 0.
    """

    min_tokens: int = 64
    every: int | None = None
    host_bytes: int = 0

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens must be at least 1, got {self.min_tokens}")
        if self.every is not None and self.every < self.min_tokens:
            raise ValueError(
                f"every must be at least min_tokens, now {self.min_tokens}, got {self.every}"
            )
        if self.host_bytes < 0:
            raise ValueError(f"host_bytes must not be negative, got {self.host_bytes}")
