"""Buckets: sizes that steps are padded to, so that one graph and its buffers serve all lengths."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Sizes of one padded step: sequences, tokens, and pages in the table of each sequence."""

    num_seqs: int
    num_tokens: int
    num_pages: int


def round_up(size: int, sizes: Sequence[int]) -> int:
    """Find the first of the ascending ``sizes`` that is not less than ``size``.

    Raises:
        ValueError: all of them are less.
    """
    i = bisect_left(sizes, size)
    if i == len(sizes):
        raise ValueError(f"size {size} is over the largest bucket {sizes[-1]}")
    return sizes[i]


def geometric(first: int, last: int, ratio: int = 2) -> tuple[int, ...]:
    """List sizes from ``first`` to ``last``, each ``ratio`` times the one before."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= ratio
    return (*sizes, last)


def token_sizes(max_tokens: int) -> tuple[int, ...]:
    """List sizes of extend steps: 16 apart up to 256, then 64 apart, so that padding is small."""
    fine = range(16, min(256, max_tokens), 16)
    coarse = range(256, max_tokens, 64)
    return (*fine, *coarse, max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """Ascending sizes that steps are padded to; the last of each is the largest.

    Attributes:
        decode_seqs: sequences of a decode step; None leaves decode steps unpadded.
        seqs: sequences of an extend step.
        tokens: tokens of an extend step.
        half_tokens: tokens of each half of a step that is cut in two.
        pages: width of the page table.
        page_size: tokens of a page.
        chunk_rows: rows of the tables of layers that read a prefix in chunks; None leaves these
            tables unpadded.
    """

    decode_seqs: tuple[int, ...] | None
    seqs: tuple[int, ...]
    tokens: tuple[int, ...]
    half_tokens: tuple[int, ...]
    pages: tuple[int, ...]
    page_size: int
    chunk_rows: tuple[int, ...] | None

    @classmethod
    def fine(
        cls, *, max_seqs: int, max_tokens: int, half_tokens: int, num_pages: int, page_size: int
    ) -> StepSizes:
        """Choose many sizes, for little padding: for graphs that serve every size."""
        return cls(
            decode_seqs=None,
            seqs=geometric(2, max(max_seqs, 2)),
            tokens=token_sizes(max_tokens),
            half_tokens=token_sizes(half_tokens),
            pages=geometric(2, max(num_pages, 2)),
            page_size=page_size,
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
        """Choose few sizes: for graphs that are captured once for each size.

        Sequences of a decode step and tokens double. Widths of tables grow faster: their padding is
        copied, but no kernel works on it.

        ``small_extends`` pads extend steps as finely as decode steps. It is for runners where
        extend steps serve decode too, or are chosen by the number of tokens of each sequence.
        """
        decode_seqs = geometric(1, max(max_seqs, 2))
        return cls(
            decode_seqs=decode_seqs,
            seqs=decode_seqs if small_extends else geometric(8, max(max_seqs, 2), 8),
            tokens=geometric(1 if small_extends else min(64, max_tokens), max_tokens),
            half_tokens=geometric(min(64, half_tokens), half_tokens),
            pages=geometric(64, max(num_pages, 2), 4),
            page_size=page_size,
            chunk_rows=geometric(64, max(64, num_pages * page_size)),
        )
