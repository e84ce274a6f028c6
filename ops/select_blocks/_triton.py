# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton": write the new keys, score all blocks, take the best of each query."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.page_bounds import check_page_indices
from torch_hybrid.ops.triton.devices import interpreted
from torch_hybrid.ops.triton.ragged import (
    first_token_of_block,
    num_blocks,
    sequence_of_block,
    sequence_of_token,
)

_ROWS = 64  # queries and heads that a program scores together, where there are as many
_FEWEST_ROWS = 16  # that a product takes
_BLOCK_N = 64
_DIGIT: tl.constexpr = tl.constexpr(8)  # bits of a score that a pass decides on


def select_blocks(
    q: Tensor,
    keys: Tensor,
    weights: Tensor | None,
    block_keys: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
    top_k: int,
) -> Tensor:
    """Launcher of ``torch_hybrid::select_blocks``.

    Scores of all blocks that a row of the page table can name are kept between two launches:
    ``4 * T * max_pages * page_size / block_size`` bytes.
    """
    num_tokens, num_heads, index_dim = q.shape
    num_seqs, max_pages = page_table.shape
    page_blocks = block_keys.shape[1]
    max_blocks = max_pages * page_blocks
    if q.device.type == "cpu":
        check_page_indices(
            cu_seqlens,
            seq_lens,
            page_table,
            slot_mapping,
            num_pages=block_keys.shape[0],
            page_size=page_blocks * block_size,
        )
    chosen = q.new_empty((num_tokens, top_k), dtype=torch.int32)
    if num_tokens == 0 or num_seqs == 0:
        return chosen.fill_(-1)
    block_d = triton.next_power_of_2(index_dim)
    _write_kernel[(num_tokens,)](
        keys,
        block_keys,
        cu_seqlens,
        slot_mapping,
        num_seqs,
        keys.stride(0),
        D=index_dim,
        BLOCK_SIZE=block_size,
        BLOCK_D=block_d,
        num_warps=1,
    )
    scores = None
    if max_blocks > top_k:
        scores = q.new_empty((num_tokens, max_blocks), dtype=torch.float32)
        heads = triton.next_power_of_2(num_heads)
        # Products of float32 are no tensor core's, and take registers for every element.
        is_narrow = num_tokens == num_seqs or q.itemsize > 2
        rows, block_n = (
            (_FEWEST_ROWS if is_narrow else _ROWS),
            (_BLOCK_N if q.itemsize == 2 else 16),
        )
        block_q = max(1, rows // heads)
        grid = (num_blocks(num_tokens, num_seqs, block_q), triton.cdiv(max_blocks, block_n))
        _score_kernel[grid](
            q,
            weights,
            block_keys,
            cu_seqlens,
            seq_lens,
            page_table,
            scores,
            num_seqs,
            max_blocks,
            q.stride(0),
            q.stride(1),
            page_table.stride(0),
            H=num_heads,
            D=index_dim,
            PAGE_BLOCKS=page_blocks,
            BLOCK_SIZE=block_size,
            TOP_K=top_k,
            BLOCK_Q=block_q,
            BLOCK_H=max(heads, _FEWEST_ROWS) if block_q == 1 else heads,
            BLOCK_D=max(16, block_d),
            BLOCK_N=block_n,
            # The interpreter holds bfloat16 as integers and multiplies them as such.
            FLOAT32_PRODUCTS=interpreted() and q.dtype == torch.bfloat16,
            num_warps=4,
            num_stages=2,
            enable_fp_fusion=True,
        )
    _take_kernel[(num_tokens,)](
        scores,
        cu_seqlens,
        seq_lens,
        chosen,
        num_seqs,
        max_blocks,
        BLOCK_SIZE=block_size,
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK=min(2048, triton.next_power_of_2(max_blocks)),
        num_warps=4,
    )
    return chosen


@triton.jit(do_not_specialize=["num_seqs"])
def _write_kernel(
    keys: tl.tensor,
    block_keys: tl.tensor,
    cu_seqlens: tl.tensor,
    slot_mapping: tl.tensor,
    num_seqs: tl.tensor,
    stride_key: tl.tensor,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program: one token, which writes a key if it is the last of its block."""
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token)
    is_last = slot % BLOCK_SIZE == BLOCK_SIZE - 1
    if (token < tl.load(cu_seqlens + num_seqs)) & is_last:
        index = tl.arange(0, BLOCK_D)
        b_key = tl.load(keys + token.to(tl.int64) * stride_key + index, mask=index < D)
        row = (slot // BLOCK_SIZE).to(tl.int64)
        tl.store(block_keys + row * D + index, b_key, mask=index < D)


@triton.jit(do_not_specialize=["num_seqs", "max_blocks"])
def _score_kernel(
    q: tl.tensor,
    weights: tl.tensor | None,
    block_keys: tl.tensor,
    cu_seqlens: tl.tensor,
    seq_lens: tl.tensor,
    page_table: tl.tensor,
    scores: tl.tensor,
    num_seqs: tl.tensor,
    max_blocks: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_table: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FLOAT32_PRODUCTS: tl.constexpr,
) -> None:
    """One program: BLOCK_Q queries of a sequence with all their heads, and BLOCK_N blocks."""
    seq = sequence_of_block(cu_seqlens, num_seqs, tl.program_id(0), BLOCK_Q)
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    first = first_token_of_block(begin, seq, tl.program_id(0), BLOCK_Q)
    if first >= end:
        return
    last = tl.minimum(first + BLOCK_Q, end) - 1
    complete = (tl.load(seq_lens + seq) - end + last + 1) // BLOCK_SIZE
    first_block = tl.program_id(1) * BLOCK_N
    # Queries that can take all of their blocks need no scores.
    if (first_block >= complete) | (complete <= TOP_K):
        return

    row = tl.arange(0, BLOCK_Q * BLOCK_H)
    token = (first + row // BLOCK_H).to(tl.int64)
    head = row % BLOCK_H
    is_row = (token <= last) & (head < H)
    index_d = tl.arange(0, BLOCK_D)
    p_q = q + token * stride_q_token + head * stride_q_head
    mask_d = index_d < D
    b_q = tl.load(
        p_q[:, None] + index_d[None, :], mask=is_row[:, None] & mask_d[None, :], other=0.0
    )

    block = first_block + tl.arange(0, BLOCK_N)
    is_block = block < complete
    page = tl.load(page_table + seq * stride_table + block // PAGE_BLOCKS, mask=is_block, other=0)
    place = page.to(tl.int64) * PAGE_BLOCKS + block % PAGE_BLOCKS
    p_key = block_keys + place[:, None] * D + index_d[None, :]
    b_key = tl.load(p_key, mask=is_block[:, None] & mask_d[None, :], other=0.0)
    if FLOAT32_PRODUCTS:
        b_q = b_q.to(tl.float32)
        b_key = b_key.to(tl.float32)
    products = tl.dot(b_q, tl.trans(b_key), out_dtype=tl.float32, input_precision="ieee")
    similar = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if weights is not None:
        similar *= tl.load(weights + token * H + head, mask=is_row, other=0.0)[:, None]
    total = tl.sum(tl.reshape(similar, [BLOCK_Q, BLOCK_H, BLOCK_N]), 1)
    total = tl.where(total == total, total, -float("inf"))
    total = tl.where(total == 0.0, 0.0, total)  # of one sign, as its bits are compared

    query = (first + tl.arange(0, BLOCK_Q)).to(tl.int64)
    p_score = scores + query[:, None] * max_blocks + block[None, :]
    tl.store(p_score, total, mask=(query <= last)[:, None] & is_block[None, :])


@triton.jit
def _keys_of(
    scores: tl.tensor, block: tl.tensor, complete: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Integers whose order is that of scores, from 0 on in 64 bits; and whether they are some."""
    is_block = block < complete
    b_score = tl.load(scores + block, mask=is_block, other=0.0)
    bits = b_score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000, is_block


@triton.jit(do_not_specialize=["num_seqs", "max_blocks"])
def _take_kernel(
    scores: tl.tensor | None,
    cu_seqlens: tl.tensor,
    seq_lens: tl.tensor,
    chosen: tl.tensor,
    num_seqs: tl.tensor,
    max_blocks: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one query.

    The score of the last block that is taken is found digit by digit, by counting how many scores
    have each; then blocks are taken in their order: all above it, and the first of those at it.
    """
    token = tl.program_id(0)
    seq = sequence_of_token(cu_seqlens, num_seqs, token)
    complete = 0
    if seq < num_seqs:
        end = tl.load(cu_seqlens + seq + 1)
        complete = (tl.load(seq_lens + seq) - end + token + 1) // BLOCK_SIZE
    own = chosen + token.to(tl.int64) * TOP_K
    if (complete <= TOP_K) | (scores is None):
        index = tl.arange(0, BLOCK_K)
        tl.store(own + index, tl.where(index < complete, index, -1), mask=index < TOP_K)
        return
    if scores is not None:
        own_scores = scores + token.to(tl.int64) * max_blocks
        left = tl.cast(TOP_K, tl.int32)
        least = tl.cast(0, tl.int64)
        digits = tl.arange(0, 2 * 2**_DIGIT)  # the upper half counts what is no candidate
        for shift in tl.static_range(32 - _DIGIT, -1, -_DIGIT):
            counts = tl.zeros([2 * 2**_DIGIT], dtype=tl.int32)
            for base in range(0, complete, BLOCK):
                key, is_block = _keys_of(own_scores, base + tl.arange(0, BLOCK), complete)
                is_candidate = is_block & ((key >> (shift + _DIGIT)) == (least >> (shift + _DIGIT)))
                b_digit = ((key >> shift) & (2**_DIGIT - 1)).to(tl.int32)
                counts += tl.histogram(tl.where(is_candidate, b_digit, 2**_DIGIT), 2 * 2**_DIGIT)
            counts = tl.where(digits < 2**_DIGIT, counts, 0)
            from_here = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
            digit = tl.max(tl.where((from_here >= left) & (digits < 2**_DIGIT), digits, 0), 0)
            left -= tl.sum(tl.where(digits > digit, counts, 0), 0)
            least += digit.to(tl.int64) << shift
        num_taken = tl.cast(0, tl.int32)
        for base in range(0, complete, BLOCK):
            block = base + tl.arange(0, BLOCK)
            key, is_block = _keys_of(own_scores, block, complete)
            is_equal = is_block & (key == least)
            rank = tl.cumsum(is_equal.to(tl.int32), 0)
            is_taken = (is_block & (key > least)) | (is_equal & (rank <= left))
            place = num_taken + tl.cumsum(is_taken.to(tl.int32), 0) - 1
            tl.store(own + place, block, mask=is_taken)
            left -= tl.sum(is_equal.to(tl.int32), 0)
            num_taken += tl.sum(is_taken.to(tl.int32), 0)
