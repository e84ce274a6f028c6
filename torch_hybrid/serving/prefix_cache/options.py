"""Options of an engine's prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch_hybrid.host.ints import check_int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCache:
    """Options of a prefix cache; ``Runner(max_snapshots=...)`` bounds the number of kept states.

    Args:
        min_tokens: the fewest tokens that a snapshot must save over the one before it.
        every: also keep snapshots of a prompt at multiples of this many tokens. Prompts that
            diverge anywhere then find a near one. By default snapshots are kept at the ends of
            prompts, messages and answers, and where two prompts diverge.
        host_bytes: host memory (pinned, for a GPU) for snapshots evicted from the device, which
            come back when a request can start from them.

    Raises:
        TypeError: a number of tokens is no integer.
        ValueError: ``min_tokens`` is below 1, ``every`` below ``min_tokens``, or ``host_bytes``
            below 0.
    """

    min_tokens: int = 64
    every: int | None = None
    host_bytes: int = 0

    def __post_init__(self) -> None:
        check_int("min_tokens", self.min_tokens)
        if self.every is not None:
            check_int("every", self.every)
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens must be at least 1, got {self.min_tokens}")
        if self.every is not None and self.every < self.min_tokens:
            raise ValueError(
                f"every must be at least min_tokens, now {self.min_tokens}, got {self.every}"
            )
        if self.host_bytes < 0:
            raise ValueError(f"host_bytes must not be negative, got {self.host_bytes}")
