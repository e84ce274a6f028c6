# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton": score all blocks, then write new keys and take each query's best."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_hybrid.ops.page_bounds import check_page_indices
from torch_hybrid.ops.triton.devices import PROCESSORS, interpreted, launches_early
from torch_hybrid.ops.triton.ragged import (
    first_token_of_block,
    num_blocks,
    sequence_of_block,
    sequence_of_token,
)

_ROWS = 64  # queries and heads that a program scores together, where there are as many
_FEWEST_ROWS = 16  # that a product takes
_TILE = 64  # blocks; a row of ranks has whole tiles
_SCORED_TILES = 4  # of a program, where there are many
_LONG_ROW = 8192  # blocks of a query that many warps count faster than few wait for one another
# Of a count of tiles, and of blocks: three counts are one number of 32 and of 64 bits.
_TILE_COUNT_BITS, _COUNT_BITS = 10, 21


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
    is_invariant: bool = False,
) -> Tensor:
    """Launcher of ``torch_hybrid::select_blocks``.

    ``is_invariant``: a query's scores have the bits that they have in any call.
    Ranks of all blocks that a row of the page table can name are kept between two launches:
    ``4 * T * max_pages * page_size / block_size`` bytes, up to a tile.
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
    early = launches_early(q.device)
    block_d = triton.next_power_of_2(index_dim)
    ranks, row_tiles = None, triton.cdiv(max_blocks, _TILE)
    if max_blocks > top_k:
        ranks = q.new_empty((num_tokens, row_tiles * _TILE), dtype=torch.int32)
        heads = triton.next_power_of_2(num_heads)
        # Products of float32 are no tensor core's, and take registers for every element.
        is_decode = num_tokens == num_seqs and not is_invariant
        is_narrow = is_decode or q.itemsize > 2
        rows = _FEWEST_ROWS if is_narrow else _ROWS
        block_n = _TILE if q.itemsize == 2 else 16
        block_q = max(1, rows // heads)
        # Where there are many programs, one that has found its queries scores several tiles.
        tiles = 1 if is_decode else _SCORED_TILES
        grid = (num_blocks(num_tokens, num_seqs, block_q), triton.cdiv(row_tiles, tiles))
        _score_kernel[grid](
            q,
            keys,
            weights,
            block_keys,
            cu_seqlens,
            seq_lens,
            page_table,
            ranks,
            num_seqs,
            row_tiles,
            q.stride(0),
            q.stride(1),
            keys.stride(0),
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
            MOST_BLOCKS=tiles * _TILE,
            TILE=_TILE,
            # The interpreter holds bfloat16 as integers and multiplies them as such.
            FLOAT32_PRODUCTS=interpreted() and q.dtype == torch.bfloat16,
            EARLY=early,
            num_warps=4,
            num_stages=2,
            enable_fp_fusion=True,
        )
    # One query has a processor to itself; many share it, and wait for one another's sums.
    few = num_tokens <= PROCESSORS
    block = min(2048 if few else 1024, triton.next_power_of_2(row_tiles * _TILE))
    if row_tiles * _TILE >= block << _TILE_COUNT_BITS:
        raise ValueError(
            f"page_table may name {block << _TILE_COUNT_BITS} blocks, got {max_blocks}"
        )
    _take_kernel[(num_tokens,)](
        ranks,
        keys,
        block_keys,
        cu_seqlens,
        seq_lens,
        slot_mapping,
        chosen,
        num_seqs,
        row_tiles,
        keys.stride(0),
        D=index_dim,
        BLOCK_D=block_d,
        BLOCK_SIZE=block_size,
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        TILE_COUNT_BITS=_TILE_COUNT_BITS,
        COUNT_BITS=_COUNT_BITS,
        BLOCK=block,
        TILE=_TILE,
        EARLY=early,
        num_warps=16 if few and max_blocks > _LONG_ROW else 4,
        launch_pdl=early and ranks is not None,
    )
    return chosen


@triton.jit(do_not_specialize=["num_seqs", "row_tiles"])
def _score_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    weights: tl.tensor | None,
    block_keys: tl.tensor,
    cu_seqlens: tl.tensor,
    seq_lens: tl.tensor,
    page_table: tl.tensor,
    ranks: tl.tensor,
    num_seqs: tl.tensor,
    row_tiles: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_key: tl.tensor,
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
    MOST_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    FLOAT32_PRODUCTS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program: BLOCK_Q queries of a sequence with all their heads, and blocks, BLOCK_N at once.

    A block that a new token completes has that token's key, which is not written yet.
    """
    if EARLY:
        gdc_launch_dependents()
    seq = sequence_of_block(cu_seqlens, num_seqs, tl.program_id(0), BLOCK_Q)
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    first = first_token_of_block(begin, seq, tl.program_id(0), BLOCK_Q)
    last = tl.minimum(first + BLOCK_Q, end) - 1
    ahead = tl.load(seq_lens + seq) - end  # of a token's number, to its position
    complete = (ahead + last + 1) // BLOCK_SIZE
    first_block = tl.program_id(1) * MOST_BLOCKS
    # The last tile that is read of a row has a rank in every place.
    end_block = tl.cdiv(complete, TILE) * TILE
    # Queries that can take all of their blocks need no scores.
    if (first >= end) | (first_block >= end_block) | (complete <= TOP_K):
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
    if weights is not None:
        b_weight = tl.load(weights + token * H + head, mask=is_row, other=0.0)
    query = first + tl.arange(0, BLOCK_Q)
    seen = (ahead + query + 1) // BLOCK_SIZE
    p_rank = ranks + query.to(tl.int64)[:, None] * (row_tiles * TILE)
    if FLOAT32_PRODUCTS:
        b_q = b_q.to(tl.float32)
    for i in range(tl.cdiv(tl.minimum(MOST_BLOCKS, end_block - first_block), BLOCK_N)):
        block = first_block + i * BLOCK_N + tl.arange(0, BLOCK_N)
        is_block = block < complete
        owner = (block + 1) * BLOCK_SIZE - 1 - ahead
        is_new = owner >= begin
        p_page = page_table + seq * stride_table + block // PAGE_BLOCKS
        page = tl.load(p_page, mask=is_block & ~is_new, other=0)
        place = page.to(tl.int64) * PAGE_BLOCKS + block % PAGE_BLOCKS
        own = tl.maximum(owner, 0).to(tl.int64) * stride_key
        p_block = tl.where(is_new, keys + own, block_keys + place * D)
        p_key = p_block[:, None] + index_d[None, :]
        b_key = tl.load(p_key, mask=is_block[:, None] & mask_d[None, :], other=0.0)
        if FLOAT32_PRODUCTS:
            b_key = b_key.to(tl.float32)
        products = tl.dot(b_q, tl.trans(b_key), out_dtype=tl.float32, input_precision="ieee")
        similar = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if weights is not None:
            similar *= b_weight[:, None]
        total = tl.sum(tl.reshape(similar, [BLOCK_Q, BLOCK_H, BLOCK_N]), 1)
        rank = tl.where(block[None, :] < seen[:, None], _rank_of(total), 0)
        tl.store(p_rank + block[None, :], rank, mask=(query <= last)[:, None])


@triton.jit
def _rank_of(score: tl.tensor) -> tl.tensor:
    """32 bits whose order, without a sign, is that of scores; none has 0."""
    score = tl.where(score == score, score, -float("inf"))
    score = tl.where(score == 0.0, 0.0, score)  # of one sign
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) | -(2**31))


@triton.jit
def _load_ranks(row: tl.tensor, block: tl.tensor, end: tl.tensor) -> tl.tensor:
    """Of blocks from a tile's first on; 0 from ``end`` on, where a tile ends."""
    return tl.load(row + block, mask=block < end, other=0).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["num_seqs", "row_tiles"])
def _take_kernel(
    ranks: tl.tensor | None,
    keys: tl.tensor,
    block_keys: tl.tensor,
    cu_seqlens: tl.tensor,
    seq_lens: tl.tensor,
    slot_mapping: tl.tensor,
    chosen: tl.tensor,
    num_seqs: tl.tensor,
    row_tiles: tl.tensor,
    stride_key: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE_COUNT_BITS: tl.constexpr,
    COUNT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program: one query, which writes a key if its token is the last of a block.

    The rank of the last block that is taken is found from its highest bits on, by counting how many
    blocks reach each of three ranks, until exactly TOP_K reach one; then blocks are taken in their
    order: all above the last rank, and the first of those at it.
    """
    token = tl.program_id(0)
    seq = sequence_of_token(cu_seqlens, num_seqs, token)
    complete = 0
    if seq < num_seqs:
        end = tl.load(cu_seqlens + seq + 1)
        complete = (tl.load(seq_lens + seq) - end + token + 1) // BLOCK_SIZE
        slot = tl.load(slot_mapping + token)
        if slot % BLOCK_SIZE == BLOCK_SIZE - 1:
            index_d = tl.arange(0, BLOCK_D)
            b_key = tl.load(keys + token.to(tl.int64) * stride_key + index_d, mask=index_d < D)
            own_key = block_keys + (slot // BLOCK_SIZE).to(tl.int64) * D
            tl.store(own_key + index_d, b_key, mask=index_d < D)
    if EARLY:
        gdc_wait()
    own = chosen + token.to(tl.int64) * TOP_K
    if (complete <= TOP_K) | (ranks is None):
        index = tl.arange(0, BLOCK_K)
        tl.store(own + index, tl.where(index < complete, index, -1), mask=index < TOP_K)
        return
    if ranks is not None:
        row = ranks + token.to(tl.int64) * (row_tiles * TILE)
        index = tl.arange(0, BLOCK)
        end_block = tl.cdiv(complete, TILE) * TILE
        last = tl.cast(0, tl.uint32)  # the highest rank that TOP_K are known to reach
        num_reach = complete
        num_above = tl.cast(0, tl.int32)  # that reach the lowest rank that fewer are known to
        shift = tl.cast(30, tl.int32)
        while (num_reach > TOP_K) & (shift >= 0):
            step = tl.cast(1, tl.uint32) << shift
            # Three counts are one number: of a place in all tiles, and of all places.
            reach = tl.zeros([BLOCK], dtype=tl.int32)
            for base in range(0, end_block, BLOCK):
                rank = _load_ranks(row, base + index, end_block)
                for i in tl.static_range(3):
                    reaches = rank >= last + (i + 1) * step
                    reach += tl.where(reaches, 1 << (i * TILE_COUNT_BITS), 0)
            all_three = tl.zeros([BLOCK], dtype=tl.int64)
            for i in tl.static_range(3):
                count = (reach >> (i * TILE_COUNT_BITS)) & ((1 << TILE_COUNT_BITS) - 1)
                all_three += count.to(tl.int64) << (i * COUNT_BITS)
            all_three = tl.sum(all_three, 0)
            for _ in tl.static_range(3):
                num_next = (all_three & ((1 << COUNT_BITS) - 1)).to(tl.int32)
                all_three >>= COUNT_BITS
                reaches = num_next >= TOP_K
                last = tl.where(reaches, last + step, last)
                num_reach = tl.where(reaches, num_next, num_reach)
                num_above = tl.where(reaches, num_above, tl.maximum(num_above, num_next))
            shift -= 2
        left = TOP_K - num_above
        if num_reach == TOP_K:
            last, left = last - 1, 0

        num_before = tl.cast(0, tl.int32)
        num_equal = tl.cast(0, tl.int32)
        for base in range(0, end_block, BLOCK):
            block = base + index
            rank = _load_ranks(row, block, end_block)
            is_above, is_equal = rank > last, rank == last
            # Both are counted at once: 16 bits have room for a block's.
            both = is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16)
            before = tl.cumsum(both, 0) - both
            equal_before = num_equal + (before >> 16)
            is_taken = is_above | (is_equal & (equal_before < left))
            place = num_before + (before & 0xFFFF) + tl.minimum(equal_before, left)
            tl.store(own + place, block, mask=is_taken)
            both = tl.sum(both, 0)
            num_before += both & 0xFFFF
            num_equal += both >> 16
