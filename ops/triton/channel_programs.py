"""Launches of recurrences with a few state numbers a channel, whose states stay in registers.

With many tokens, sequences are cut into segments. A first launch walks each sequence's first
segment, and all others but its last from a zero state, for the states that they leave. A second,
"carried" launch walks all but the first from where the segment before ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from torch_hybrid.ops.triton.ragged import first_token_of_block, num_blocks, sequence_of_block

_FETCHED = 4  # tokens of a sequence that are fetched at once
_MOST_CHANNELS = 128
_SEGMENT = 64  # tokens
_FEWEST_SEGMENTS = 4  # of as many tokens as there are; with fewer a second launch costs more


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelPrograms:
    """The programs of a call: one for each sequence, or each segment of one, and block of channels.

    How many sequences there are does not count: in a captured graph most of them may be empty.
    """

    num_walks: int  # sequences, or segments of them
    num_segments: int  # whose states are kept for the one after them
    segment: int  # tokens; 0 where sequences are walked whole
    rows: int  # tokens that are fetched at once
    num_channels: int

    @classmethod
    def of(
        cls,
        num_tokens: int,
        num_seqs: int,
        num_channels: int,
        *,
        is_invariant: bool = False,
        is_cut: bool = False,
    ) -> ChannelPrograms:
        """Choose the programs of a call.

        Args:
            is_invariant: use one kernel for all lengths, which walks sequences whole.
            is_cut: cut sequences however few tokens there are: a packed one has the bits that it
                has alone.
        """
        is_decode = num_tokens <= num_seqs and not is_invariant and not is_cut
        is_short = num_tokens < _FEWEST_SEGMENTS * _SEGMENT and not is_cut
        is_whole = is_decode or is_invariant or is_short
        return cls(
            num_walks=num_seqs if is_whole else num_blocks(num_tokens, num_seqs, _SEGMENT),
            num_segments=0 if is_whole else num_tokens // _SEGMENT,
            segment=0 if is_whole else _SEGMENT,
            rows=1 if is_decode else _FETCHED,
            num_channels=num_channels,
        )

    def launches(self) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
        """Yield each launch's grid and constants."""
        block_c = min(_MOST_CHANNELS, triton.next_power_of_2(self.num_channels))
        for is_carried in (False, True) if self.segment else (False,):
            # One program more for each block of channels, for padding.
            grid = (self.num_walks + (not is_carried), triton.cdiv(self.num_channels, block_c))
            yield (
                grid,
                {
                    "C": self.num_channels,
                    "SEGMENT": self.segment,
                    "CARRIED": is_carried,
                    "ROWS": self.rows,
                    "BLOCK_C": block_c,
                    "num_warps": max(1, block_c // 32),
                    "enable_fp_fusion": True,
                },
            )


@triton.jit
def walk_of(
    cu_seqlens: tl.tensor,
    num_seqs: tl.tensor,
    walk: tl.tensor,
    SEGMENT: tl.constexpr,
    CARRIED: tl.constexpr,
) -> tl.tuple:
    """Find the tokens of a walk: ``(seq, begin, end, first, last, is_walked)``.

    A walk is a sequence or a segment of one. ``begin`` and ``end`` bound the sequence, ``first``
    and ``last`` the walk; ``is_walked`` tells whether this launch walks it.
    """
    seq = walk
    if SEGMENT > 0:
        seq = sequence_of_block(cu_seqlens, num_seqs, walk, SEGMENT)
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    first, last = begin, end
    if SEGMENT > 0:
        first = first_token_of_block(begin, seq, walk, SEGMENT)
        last = tl.minimum(first + SEGMENT, end)
    is_first = first == begin
    if CARRIED:
        is_walked = (first < end) & (not is_first)
    else:
        is_walked = (first < end) & (is_first | (last < end))
    return seq, begin, end, first, last, is_walked


@triton.jit
def zero_padding(
    out: tl.tensor,
    cu_seqlens: tl.tensor,
    num_seqs: tl.tensor,
    num_tokens: tl.tensor,
    channel: tl.tensor,
    mask: tl.tensor,
    C: tl.constexpr,
) -> None:
    """Write 0 to the rows past the last sequence, of ``out [T, C]``."""
    zeros = tl.zeros_like(channel).to(out.dtype.element_ty)
    for token in range(tl.load(cu_seqlens + num_seqs), num_tokens):
        tl.store(out + tl.cast(token, tl.int64) * C + channel, zeros, mask=mask)
