"""The sizes that a step is padded to, so that the same code and buffers serve all lengths."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Sizes of one padded step: sequences, tokens, and pages that a sequence may own."""

    num_seqs: int
    num_tokens: int
    num_pages: int


def round_up(size: int, sizes: Sequence[int]) -> int:
    """The first of the ascending ``sizes`` that holds ``size``.

    Raises:
        ValueError: none does.
    """
    i = bisect_left(sizes, size)
    if i == len(sizes):
        raise ValueError(f"size {size} is over the largest bucket {sizes[-1]}")
    return sizes[i]


def doubling(first: int, last: int) -> tuple[int, ...]:
    """``first``, twice that, and so on; ends with ``last``."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def token_sizes(max_tokens: int) -> tuple[int, ...]:
    """Sizes of extend steps: 16 apart up to 256, then 64 apart, so that padding stays small."""
    fine = range(16, min(256, max_tokens), 16)
    coarse = range(256, max_tokens, 64)
    return (*fine, *coarse, max_tokens)
