"""Implementation "triton": pool and score in one launch, then take the best blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from torch_hybrid.ops.pooled_selection_step.op import PooledSelectionStep
from torch_hybrid.ops.triton.block_ranks import TILE, ranks_of, take_blocks
from torch_hybrid.ops.triton.devices import PROCESSORS, launches_early, multiplies_float32
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.pooling import pool, rows_of_block

_WARPS = 4
# That run at once. Where tiles are more, a program takes several, and few programs are idle.
_PROGRAMS = 4 * PROCESSORS


def pooled_selection_step(x: PooledSelectionStep) -> Tensor:
    """Launch ``torch_hybrid::pooled_selection_step``.

    Ranks of all blocks that a row of the page table can name are kept between the two launches.
    """
    (num_tokens, num_heads, index_dim), size = x.q.shape, x.bias.shape[0]
    (num_seqs, max_pages), page_blocks = x.page_table.shape, x.block_keys.shape[1]
    max_blocks = max_pages * page_blocks
    if num_tokens == 0 or num_seqs == 0:
        return x.new_chosen().fill_(-1)
    early, row_tiles = launches_early(x.q.device), triton.cdiv(max_blocks, TILE)
    ranks = torch.empty((num_tokens, row_tiles * TILE), dtype=torch.int32, device=x.q.device)
    num_programs = max(1, min(row_tiles, _PROGRAMS // num_seqs))
    bind(_pool_and_score_kernel, x)[(num_seqs, num_programs + 1)](
        ranks=ranks,
        max_blocks=max_blocks,
        row_tiles=row_tiles,
        PAGE_BLOCKS=page_blocks,
        SIZE=size,
        BLOCK_H=max(16, triton.next_power_of_2(num_heads)),
        BLOCK_D=max(16, triton.next_power_of_2(index_dim)),
        BLOCK_P=triton.next_power_of_2(size),
        TILE=TILE,
        HAS_MORE=num_programs < row_tiles,
        FLOAT32_PRODUCTS=multiplies_float32(x.q),
        EARLY=early,
        num_warps=_WARPS,
        num_stages=1,  # a program has one tile, or few
        enable_fp_fusion=True,
    )
    return take_blocks(x, ranks, None, max_blocks=max_blocks, block_size=size, early=early)


@triton.jit(do_not_specialize=["max_blocks", "row_tiles"])
def _pool_and_score_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    gates: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor | None,
    state: tl.tensor,
    block_keys: tl.tensor,
    cu_seqlens: tl.tensor,
    seq_lens: tl.tensor,
    page_table: tl.tensor,
    slot_mapping: tl.tensor,
    initial_indices: tl.tensor,
    state_indices: tl.tensor,
    ranks: tl.tensor,
    max_blocks: tl.tensor,
    row_tiles: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_keys: tl.tensor,
    stride_gates: tl.tensor,
    stride_page_table: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE_BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILE: tl.constexpr,
    HAS_MORE: tl.constexpr,
    FLOAT32_PRODUCTS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Rank TILE blocks in a program, for the token of a sequence; its last program has none.

    Where there are more blocks, a program goes on with those that lie as many tiles further as
    there are programs.

    A token completes a block, whose key is pooled, ranked and written by the program that has the
    block; or it does not, and the last program leaves it to the slot. So one program alone goes to
    a slot.
    """
    if EARLY:
        gdc_launch_dependents()
    seq = tl.program_id(0)
    first_block = tl.program_id(1) * TILE
    num_programs = tl.num_programs(1) - 1
    # Nothing here waits for another: one look at memory for all.
    token = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    length = tl.load(seq_lens + seq)
    initial = tl.load(initial_indices + seq).to(tl.int64)
    slot = tl.load(state_indices + seq).to(tl.int64)
    table = page_table + seq.to(tl.int64) * stride_page_table
    page = _pages_of(table, first_block, max_blocks, PAGE_BLOCKS, TILE)
    length = tl.where(token < end, length, 0)  # without a token, no block is looked at

    place = tl.arange(0, BLOCK_P)
    index_d = tl.arange(0, BLOCK_D)
    mask_d = index_d < D
    held = state + initial * ((SIZE - 1) * 2 * D)
    complete = length // SIZE
    left = length % SIZE
    if tl.program_id(1) == num_programs:
        if (slot == 0) | (left == 0):
            return
        source = token + 1 - left + place
        mask = (place < left)[:, None] & mask_d[None, :]
        b_own = rows_of_block(
            keys, stride_keys, held, source, token, place, index_d, mask, initial != 0, D
        )
        b_gate = rows_of_block(
            gates, stride_gates, held + D, source, token, place, index_d, mask, initial != 0, D
        )
        tl.debug_barrier()  # all of the slot that is read has been
        p_state = state + slot * ((SIZE - 1) * 2 * D) + place[:, None] * (2 * D) + index_d[None, :]
        tl.store(p_state, b_own, mask=mask)
        tl.store(p_state + D, b_gate, mask=mask)
        return

    # A query that can take all of its blocks needs no ranks, and no more than the last tile's key.
    if (first_block >= complete) | ((complete <= TOP_K) & (left != 0)):
        return
    heads = (q + token.to(tl.int64) * stride_q_token, stride_q_head, weights)
    tokens = (keys, stride_keys, gates, stride_gates, bias, slot_mapping)
    past = (held, initial != 0, token, complete, left == 0)
    row = ranks + token.to(tl.int64) * (row_tiles * TILE)
    # With a loop around it, what stays the same takes registers that several programs could have.
    if HAS_MORE:
        for base in range(first_block, complete, num_programs * TILE):
            _rank_tile(
                base, page, heads, tokens, past, block_keys, row,
                H, D, PAGE_BLOCKS, SIZE, TOP_K, BLOCK_H, BLOCK_D, BLOCK_P, TILE, FLOAT32_PRODUCTS,
            )  # fmt: skip
            page = _pages_of(table, base + num_programs * TILE, max_blocks, PAGE_BLOCKS, TILE)
    else:
        _rank_tile(
            first_block, page, heads, tokens, past, block_keys, row,
            H, D, PAGE_BLOCKS, SIZE, TOP_K, BLOCK_H, BLOCK_D, BLOCK_P, TILE, FLOAT32_PRODUCTS,
        )  # fmt: skip


@triton.jit
def _rank_tile(
    base: tl.tensor,
    page: tl.tensor,
    heads: tl.tuple,
    tokens: tl.tuple,
    past: tl.tuple,
    block_keys: tl.tensor,
    row: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE_BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILE: tl.constexpr,
    FLOAT32_PRODUCTS: tl.constexpr,
) -> None:
    """Rank the blocks from ``base`` on, which lie in pages [TILE].

    Of these, write the key of the one that the token completes, if it is among them.
    """
    q, stride_q_head, weights = heads
    keys, stride_keys, gates, stride_gates, bias, slot_mapping = tokens
    held, is_known, token, complete, completes = past
    index_d, place, head = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_H)
    mask_d = (index_d < D)[None, :]
    block = base + tl.arange(0, TILE)
    is_ranked = complete > TOP_K
    pools = completes & (complete <= base + TILE)
    is_held = (block < complete - completes.to(tl.int32)) & is_ranked
    p_key = block_keys + (page.to(tl.int64) * PAGE_BLOCKS + block % PAGE_BLOCKS)[:, None] * D
    b_key = tl.load(p_key + index_d[None, :], mask=is_held[:, None] & mask_d, other=0.0)
    is_head = (head < H) & is_ranked
    b_weight = None
    if weights is not None:
        b_weight = tl.load(weights + token * H + head, mask=is_head, other=0.0)
    p_q = (q + head * stride_q_head)[:, None] + index_d[None, :]
    mask_q = is_head[:, None] & mask_d
    # Asked for last, on both ways: the compiler stores queries as soon as they are there, and what
    # comes after that waits for them.
    if pools:
        source = token - (SIZE - 1) + place
        mask = (place < SIZE)[:, None] & mask_d
        b_gate = rows_of_block(
            gates, stride_gates, held + D, source, token, place, index_d, mask, is_known, D
        )
        b_own = rows_of_block(
            keys, stride_keys, held, source, token, place, index_d, mask, is_known, D
        )
        b_bias = tl.load(bias + place[:, None] * D + index_d[None, :], mask=mask, other=0.0)
        own_block = tl.load(slot_mapping + token).to(tl.int64) // SIZE
        b_q = tl.load(p_q, mask=mask_q, other=0.0)
        b_new = pool(b_own, b_gate, b_bias, place, SIZE).to(block_keys.dtype.element_ty)
        tl.store(block_keys + own_block * D + index_d, b_new, mask=index_d < D)
        b_key = tl.where((block == complete - 1)[:, None], b_new[None, :], b_key)
    else:
        b_q = tl.load(p_q, mask=mask_q, other=0.0)
    if is_ranked:
        if FLOAT32_PRODUCTS:
            b_q = b_q.to(tl.float32)
            b_key = b_key.to(tl.float32)
        rank = ranks_of(b_q, b_weight, b_key, 1, BLOCK_H, TILE)
        tl.store((row + block)[None, :], tl.where((block < complete)[None, :], rank, 0))


@triton.jit
def _pages_of(
    table: tl.tensor,
    first_block: tl.tensor,
    max_blocks: tl.tensor,
    PAGE_BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Load the pages [TILE] of blocks, of those that a row of the page table can name."""
    block = first_block + tl.arange(0, TILE)
    return tl.load(table + block // PAGE_BLOCKS, mask=block < max_blocks, other=0)
