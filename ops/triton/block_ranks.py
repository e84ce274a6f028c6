"""Selection of KV blocks by score: scores as integers of the same order, and a token's top k of
them."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_hybrid.ops.triton.devices import PROCESSORS
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.ragged import sequence_of_token

TILE = 64  # blocks; a row of ranks has whole tiles
_LONG_ROW = 8192  # blocks of a query that many warps count faster than few wait for one another
_WARPS, _LONG_WARPS = 4, 16
# Of a count of tiles, and of blocks: three counts are one number of 32 and of 64 bits.
_TILE_COUNT_BITS, _COUNT_BITS = 10, 21


def take_blocks(
    x: Any,
    ranks: Tensor | None,
    keys: Tensor | None,
    *,
    max_blocks: int,
    block_size: int,
    early: bool,
) -> Tensor:
    """Select the best blocks [T, top_k] of each token by their ranks; -1 fills a row with fewer
    blocks.

    Args:
        x: arguments of an op that selects blocks.
        ranks: [T, blocks] int32 of the launch before, a row of whole tiles, 0 past a token's last
            block. Rows of tokens with at most top_k blocks are not read. None if all are such.
        keys: [T, D] pooled keys. **x.block_keys** receives the key of each token that completes a
            block. None where the launch before has written them.
        max_blocks: blocks that a row of the page table can name.
        early: whether the launch that writes ``ranks`` lets this one begin before it ends (PDL).
    """
    chosen: Tensor = x.new_chosen()
    num_tokens, top_k = chosen.shape
    row_tiles = triton.cdiv(max_blocks, TILE)
    # One query has a processor to itself; many share it, and wait for one another's sums.
    few = num_tokens <= PROCESSORS
    block = min(2048 if few else 1024, triton.next_power_of_2(row_tiles * TILE))
    if row_tiles * TILE >= block << _TILE_COUNT_BITS:
        raise ValueError(
            f"page_table may name {block << _TILE_COUNT_BITS} blocks, got {max_blocks}"
        )
    index_dim = x.block_keys.shape[2]
    bind(_take_kernel, x)[(num_tokens,)](
        ranks=ranks,
        keys=keys,
        chosen=chosen,
        row_tiles=row_tiles,
        D=index_dim,
        BLOCK_D=triton.next_power_of_2(index_dim),
        BLOCK_SIZE=block_size,
        BLOCK_K=triton.next_power_of_2(top_k),
        TILE_COUNT_BITS=_TILE_COUNT_BITS,
        COUNT_BITS=_COUNT_BITS,
        BLOCK=block,
        TILE=TILE,
        EARLY=early,
        num_warps=_LONG_WARPS if few and max_blocks > _LONG_ROW else _WARPS,
        launch_pdl=early and ranks is not None,
    )
    return chosen


@triton.jit
def ranks_of(
    b_q: tl.tensor,
    b_weight: tl.tensor | None,
    b_key: tl.tensor,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Score the blocks of keys [BLOCK_N, D] for BLOCK_Q tokens, and rank them: [BLOCK_Q, BLOCK_N].

    A score is the sum over BLOCK_H heads of ``relu(q . key)``, weighed where there are weights.
    """
    products = tl.dot(b_q, tl.trans(b_key), out_dtype=tl.float32, input_precision="ieee")
    similar = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if b_weight is not None:
        similar *= b_weight[:, None]
    return _rank_of(tl.sum(tl.reshape(similar, [BLOCK_Q, BLOCK_H, BLOCK_N]), 1))


@triton.jit
def _rank_of(score: tl.tensor) -> tl.tensor:
    """Map float32 scores to ranks of the same order: uint32, in int32's bits, above 0; NaN is
    -inf."""
    score = tl.where(score == score, score, -float("inf"))
    score = tl.where(score == 0.0, 0.0, score)  # of one sign
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) | -(2**31))


@triton.jit
def _load_ranks(row: tl.tensor, block: tl.tensor, end: tl.tensor) -> tl.tensor:
    """Load a tile's ranks of blocks; those from ``end`` on, a multiple of TILE, are 0."""
    return tl.load(row + block, mask=block < end, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _reached(
    rank: tl.tensor, last: tl.tensor, step: tl.tensor, COUNT_BITS: tl.constexpr
) -> tl.tensor:
    """Mark which of ``last + step``, ``last + 2 step`` and ``last + 3 step`` each rank reaches.

    A mark is one bit; the three lie COUNT_BITS apart, so that a sum of marks holds three counts.
    """
    reach = tl.zeros(rank.shape, dtype=tl.int32)
    for i in tl.static_range(3):
        reach += tl.where(rank >= last + (i + 1) * step, 1 << (i * COUNT_BITS), 0)
    return reach


@triton.jit
def _widened(counts: tl.tensor, BITS: tl.constexpr, WIDE: tl.constexpr) -> tl.tensor:
    """Widen three counts of BITS bits in an int32 to WIDE bits each in an int64."""
    wide = (counts & ((1 << BITS) - 1)).to(tl.int64)
    for i in tl.static_range(1, 3):
        wide += ((counts >> (i * BITS)) & ((1 << BITS) - 1)).to(tl.int64) << (i * WIDE)
    return wide


@triton.jit(do_not_specialize=["num_seqs", "row_tiles"])
def _take_kernel(
    ranks: tl.tensor | None,
    keys: tl.tensor | None,
    block_keys: tl.tensor,
    cu_seqlens: tl.tensor,
    seq_lens: tl.tensor,
    slot_mapping: tl.tensor,
    chosen: tl.tensor,
    num_seqs: tl.tensor,
    row_tiles: tl.tensor,
    stride_keys: tl.tensor,
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
    """Take the TOP_K blocks of highest rank of one query; store its block's key if it completes
    one.

    Grid: a program for each token. Tile: BLOCK ranks; the first tile stays in registers, further
    ones are read again in each pass. Memory: ranks come from L2, where the launch before left them.

    The program finds the TOP_K-th rank two bits a pass, from the highest on: it counts how many
    ranks reach each of three candidates. It then stores in ascending order all blocks above that
    rank, and the first blocks at it.
    """
    token = tl.program_id(0)
    seq = sequence_of_token(cu_seqlens, num_seqs, token)
    complete = 0
    if seq < num_seqs:
        end = tl.load(cu_seqlens + seq + 1)
        complete = (tl.load(seq_lens + seq) - end + token + 1) // BLOCK_SIZE
        if keys is not None:
            slot = tl.load(slot_mapping + token)
            if slot % BLOCK_SIZE == BLOCK_SIZE - 1:
                index_d = tl.arange(0, BLOCK_D)
                b_key = tl.load(keys + token.to(tl.int64) * stride_keys + index_d, mask=index_d < D)
                own_key = block_keys + (slot // BLOCK_SIZE).to(tl.int64) * D
                tl.store(own_key + index_d, b_key, mask=index_d < D)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()  # which may read all that was there before this launch
    own = chosen + token.to(tl.int64) * TOP_K
    if (complete <= TOP_K) | (ranks is None):
        index = tl.arange(0, BLOCK_K)
        tl.store(own + index, tl.where(index < complete, index, -1), mask=index < TOP_K)
        return
    if ranks is not None:
        row = ranks + token.to(tl.int64) * (row_tiles * TILE)
        index = tl.arange(0, BLOCK)
        end_block = tl.cdiv(complete, TILE) * TILE
        b_first = _load_ranks(row, index, end_block)  # which stay, through all passes
        last = tl.cast(0, tl.uint32)  # the highest rank that TOP_K are known to reach
        num_reach = complete
        num_above = tl.cast(0, tl.int32)  # that reach the lowest rank that fewer are known to
        shift = tl.cast(30, tl.int32)
        while (num_reach > TOP_K) & (shift >= 0):
            step = tl.cast(1, tl.uint32) << shift
            # Three counts are one number: of a place in all tiles, and of all places.
            reach = _reached(b_first, last, step, TILE_COUNT_BITS)
            for base in range(BLOCK, end_block, BLOCK):
                rank = _load_ranks(row, base + index, end_block)
                reach += _reached(rank, last, step, TILE_COUNT_BITS)
            if (
                complete < 1 << TILE_COUNT_BITS
            ):  # they have room already, and 32 bits are soon summed
                all_three = _widened(tl.sum(reach, 0), TILE_COUNT_BITS, COUNT_BITS)
            else:
                all_three = tl.sum(_widened(reach, TILE_COUNT_BITS, COUNT_BITS), 0)
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
        rank = b_first
        for base in range(0, end_block, BLOCK):
            block = base + index
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
            rank = _load_ranks(row, block + BLOCK, end_block)
