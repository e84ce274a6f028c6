"""Grids that follow from shapes alone, and cover ragged sequences of any lengths.

A block has BLOCK tokens. Sequence n owns the blocks from ``cu_seqlens[n] // BLOCK + n`` on: at
least as many as its tokens need, for any lengths. So ``num_blocks`` serves all batches of these
shapes. Blocks past a sequence's last token are idle.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def num_blocks(num_tokens: int, num_seqs: int, block: int) -> int:
    """Bound the blocks that any ``num_seqs`` sequences of ``num_tokens`` in all may need."""
    return num_tokens // block + num_seqs if num_seqs else 0


def sequences_of_tokens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Find the sequence of each token [T], on the device; N for padding."""
    token = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:], token, right=True, out_int32=True)


@triton.jit
def sequence_of_block(
    cu_seqlens: tl.tensor, num_seqs: tl.tensor, block: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Find the sequence that owns a block."""
    before = tl.zeros([256], dtype=tl.int32)
    for base in range(0, num_seqs, 256):
        seq = base + tl.arange(0, 256)
        begin = tl.load(cu_seqlens + seq, mask=seq < num_seqs, other=0)
        before += ((seq < num_seqs) & (begin // BLOCK + seq <= block)).to(tl.int32)
    return tl.sum(before, 0) - 1


@triton.jit
def first_token_of_block(
    begin: tl.tensor, seq: tl.tensor, block: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return the first token of a block whose sequence begins at ``begin``; an idle block's is past
    it."""
    return begin + (block - begin // BLOCK - seq) * BLOCK


@triton.jit
def tokens_of_block(
    cu_seqlens: tl.tensor, num_seqs: tl.tensor, block: tl.tensor, BLOCK: tl.constexpr
) -> tl.tuple:
    """Find a block's sequence, that one's first token and end, and the block's first token."""
    seq = sequence_of_block(cu_seqlens, num_seqs, block, BLOCK)
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    return seq, begin, end, first_token_of_block(begin, seq, block, BLOCK)


@triton.jit
def sequence_of_token(cu_seqlens: tl.tensor, num_seqs: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Find a token's sequence; ``num_seqs`` for padding."""
    before = tl.zeros([256], dtype=tl.int32)
    for base in range(0, num_seqs, 256):
        seq = base + tl.arange(0, 256)
        end = tl.load(cu_seqlens + seq + 1, mask=seq < num_seqs, other=2**31 - 1)
        before += (end <= token).to(tl.int32)
    return tl.sum(before, 0)


@triton.jit
def fetch_rows(
    pointer: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    stride: tl.tensor,
    mask: tl.tensor,
    ROWS: tl.constexpr,
) -> tl.tuple:
    """Load ROWS rows from ``first`` on, a stride apart; rows from ``last`` on are 0.

    All loads are in flight together: a loop would wait for each.
    """
    rows = ()
    begin = pointer + tl.cast(first, tl.int64) * stride
    for place in tl.static_range(ROWS):
        row = tl.load(begin + place * stride, mask=mask & (first + place < last), other=0.0)
        rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@triton.jit
def place_of_state(
    token: tl.tensor, is_given: tl.tensor, seq: tl.tensor, num_tokens: tl.tensor, C: tl.constexpr
) -> tl.tensor:
    """Return where the state before a chunk's first token stands, or one that ``seq`` was given.

    Two such places within sequences are at least C tokens apart: the chunk before the later one is
    of one sequence, which the earlier one is not in. So each has ``token // C`` for itself. Given
    states stand behind those, and no table grows with a packing's capacity.
    """
    return tl.where(is_given, (num_tokens + C - 1) // C + seq, token // C)
