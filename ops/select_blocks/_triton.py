"""Implementation "triton": score all blocks, then write new keys and take each query's best."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from torch_hybrid.ops.select_blocks.op import SelectBlocks
from torch_hybrid.ops.triton.block_ranks import TILE, ranks_of, take_blocks
from torch_hybrid.ops.triton.devices import launches_early, multiplies_float32
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.ragged import num_blocks, tokens_of_block

_ROWS = 64  # queries and heads that a program scores together, where there are as many
_FEWEST_ROWS = 16  # that a product takes
_SCORED_TILES = 4  # of a program, where there are many


def select_blocks(x: SelectBlocks, *, is_invariant: bool = False) -> Tensor:
    """Launch ``torch_hybrid::select_blocks``.

    ``is_invariant``: a query's scores have the bits that they have in any call.
    Ranks of all blocks that a row of the page table can name are kept between two launches:
    ``4 * T * max_pages * page_size / block_size`` bytes, up to a tile.
    """
    q, keys, block_keys, top_k = x.q, x.keys, x.block_keys, x.top_k
    num_tokens, num_heads, index_dim = q.shape
    num_seqs, max_pages = x.page_table.shape
    page_blocks = block_keys.shape[1]
    max_blocks = max_pages * page_blocks
    if num_tokens == 0 or num_seqs == 0:
        return x.new_chosen().fill_(-1)
    early = launches_early(q.device)
    block_d = triton.next_power_of_2(index_dim)
    ranks, row_tiles = None, triton.cdiv(max_blocks, TILE)
    if max_blocks > top_k:
        ranks = q.new_empty((num_tokens, row_tiles * TILE), dtype=torch.int32)
        heads = triton.next_power_of_2(num_heads)
        # Products of float32 are no tensor core's, and take registers for every element.
        is_decode = num_tokens == num_seqs and not is_invariant
        is_narrow = is_decode or q.itemsize > 2
        rows = _FEWEST_ROWS if is_narrow else _ROWS
        block_n = TILE if q.itemsize == 2 else 16
        block_q = max(1, rows // heads)
        # Where there are many programs, one that has found its queries scores several tiles.
        tiles = 1 if is_decode else _SCORED_TILES
        grid = (num_blocks(num_tokens, num_seqs, block_q), triton.cdiv(row_tiles, tiles))
        bind(_score_kernel, x)[grid](
            ranks=ranks,
            row_tiles=row_tiles,
            PAGE_BLOCKS=page_blocks,
            BLOCK_Q=block_q,
            BLOCK_H=max(heads, _FEWEST_ROWS) if block_q == 1 else heads,
            BLOCK_D=max(16, block_d),
            BLOCK_N=block_n,
            MOST_BLOCKS=tiles * TILE,
            TILE=TILE,
            FLOAT32_PRODUCTS=multiplies_float32(q),
            EARLY=early,
            num_warps=4,
            num_stages=2,
            enable_fp_fusion=True,
        )
    return take_blocks(x, ranks, keys, max_blocks=max_blocks, block_size=x.block_size, early=early)


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
    stride_keys: tl.tensor,
    stride_page_table: tl.tensor,
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
    """Score blocks, BLOCK_N at once, for BLOCK_Q queries of a sequence with all their heads.

    A block that a new token completes has that token's key, which is not written yet.
    """
    if EARLY:
        gdc_launch_dependents()
    seq, begin, end, first = tokens_of_block(cu_seqlens, num_seqs, tl.program_id(0), BLOCK_Q)
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
    b_weight = None
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
        p_page = page_table + seq * stride_page_table + block // PAGE_BLOCKS
        page = tl.load(p_page, mask=is_block & ~is_new, other=0)
        place = page.to(tl.int64) * PAGE_BLOCKS + block % PAGE_BLOCKS
        own = tl.maximum(owner, 0).to(tl.int64) * stride_keys
        p_block = tl.where(is_new, keys + own, block_keys + place * D)
        p_key = p_block[:, None] + index_d[None, :]
        b_key = tl.load(p_key, mask=is_block[:, None] & mask_d[None, :], other=0.0)
        if FLOAT32_PRODUCTS:
            b_key = b_key.to(tl.float32)
        rank = ranks_of(b_q, b_weight, b_key, BLOCK_Q, BLOCK_H, BLOCK_N)
        rank = tl.where(block[None, :] < seen[:, None], rank, 0)
        tl.store(p_rank + block[None, :], rank, mask=(query <= last)[:, None])
