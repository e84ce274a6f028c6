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


def geometric(first: int, last: int, ratio: int = 2) -> tuple[int, ...]:
    """``first``, ``ratio`` times that, and so on; ends with ``last``."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= ratio
    return (*sizes, last)


def token_sizes(max_tokens: int) -> tuple[int, ...]:
    """Sizes of extend steps: 16 apart up to 256, then 64 apart, so that padding stays small."""
    fine = range(16, min(256, max_tokens), 16)
    coarse = range(256, max_tokens, 64)
    return (*fine, *coarse, max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The sizes that steps are padded to, ascending; the last of each is the largest.

    ``decode_seqs`` None leaves decode steps as they are. ``chunk_rows`` is for the tables of layers
    that read a prefix in chunks; None leaves those as they are too.
    """

    decode_seqs: tuple[int, ...] | None
    seqs: tuple[int, ...]
    tokens: tuple[int, ...]
    half_tokens: tuple[int, ...]
    pages: tuple[int, ...]
    chunk_rows: tuple[int, ...] | None

    @classmethod
    def fine(cls, *, max_seqs: int, max_tokens: int, half_tokens: int, num_pages: int) -> StepSizes:
        """Little padding: for graphs that serve every size."""
        return cls(
            decode_seqs=None,
            seqs=geometric(2, max(max_seqs, 2)),
            tokens=token_sizes(max_tokens),
            half_tokens=token_sizes(half_tokens),
            pages=geometric(2, max(num_pages, 2)),
            chunk_rows=None,
        )

    @classmethod
    def coarse(
        cls,
        *,
        max_seqs: int,
        max_tokens: int,
        half_tokens: int,
        num_pages: int,
        page_size: int,
        small_extends: bool = False,
    ) -> StepSizes:
        """Few sizes: for graphs that are captured once for each. Sequences of a decode step and
        tokens double; tables, where padding is copied but is no work, grow in wider strides.

        ``small_extends``: steps that extend are padded as little as decode steps: they are those
        too, or go by how many tokens each of their sequences has.
        """
        decode_seqs = geometric(1, max(max_seqs, 2))
        return cls(
            decode_seqs=decode_seqs,
            seqs=decode_seqs if small_extends else geometric(8, max(max_seqs, 2), 8),
            tokens=geometric(1 if small_extends else min(64, max_tokens), max_tokens),
            half_tokens=geometric(min(64, half_tokens), half_tokens),
            pages=geometric(64, max(num_pages, 2), 4),
            chunk_rows=geometric(64, max(64, num_pages * page_size)),
        )
