"""Neighbours that name many of the same blocks: a tile of queries shares what any of them sees."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.block_attention.op import BlockAttention
from torch_hybrid.ops.triton.devices import PROCESSORS
from torch_hybrid.ops.triton.hopper_attention import BLOCK_M, HopperTiles
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.ragged import num_blocks, tokens_of_block
from torch_hybrid.ops.triton.softmax import log2_scale

_MOST_QUERIES = 31  # of a tile: a bit of a number for each
_PAD = 128  # keys; a list has whole tiles, and one more that is looked up ahead
# Of a thread of the second group that computes, and of one that copies.
_REGISTERS, _COPY_REGISTERS = 208, 64
_CHUNK = 1024  # blocks that are listed at once


def attend_shared(x: BlockAttention, is_done: Tensor, out: Tensor) -> None:
    """Write the rows of tiles of queries whose keys are fewer together than apart, if any.

    Args:
        x: arguments of the op, with values; its pages have the new rows.
        is_done: [T] int32, whether a query's row is written already. **Mutated**: those of the
            queries whose rows this writes.
        out: [T, Hq, D]. **Mutated**.
    """
    q, kv = x.q, x.kv
    assert x.v is not None
    num_tokens, num_heads, _ = q.shape
    num_kv_heads, num_seqs = kv.shape[3], x.page_table.shape[0]
    tiles = HopperTiles.of(q, x.k, x.v, kv)
    block_q = BLOCK_M // (num_heads // num_kv_heads)
    num_tiles = num_blocks(num_tokens, num_seqs, block_q)
    # A tile takes the time of many queries apart: there have to be as many as processors.
    if tiles is None or block_q > _MOST_QUERIES or 4 * num_tiles * num_kv_heads < 3 * PROCESSORS:
        return
    slots, sees, num_keys = list_keys(x, is_done, block_q=block_q)
    from torch_hybrid.ops.block_attention._triton_shared_kernel import hopper_shared_kernel

    bind(hopper_shared_kernel, x, tiles)[(num_tiles * num_kv_heads,)](
        slots=slots,
        sees=sees,
        num_keys=num_keys,
        out=out,
        scale_log2=log2_scale(x.scale),
        stride_keys=slots.shape[1],
        H=num_heads,
        HK=num_kv_heads,
        BLOCK_Q=block_q,
        STAGES=tiles.num_stages,
        REGISTERS=_REGISTERS,
        COPY_REGISTERS=_COPY_REGISTERS,
        num_warps=4,
    )


def list_keys(x: BlockAttention, is_done: Tensor, *, block_q: int) -> tuple[Tensor, Tensor, Tensor]:
    """List what any query of a tile of ``block_q`` tokens sees, as ``ragged.py`` deals B of them.

    A tile is left out if all of its rows are written. So it is if its queries name less than twice
    as much as it has to read.

    Returns:
        [B, K] int32, where keys lie, rising by position, -1 after them; [B, K] int32, the queries
        of the tile that see a key, a bit for each; and [B] int32, how many keys there are, at
        least one in a tile that is not left out. ``is_done`` has a 1 for its tokens.
    """
    blocks, block_size, page_size = x.blocks, x.block_size, x.kv.shape[2]
    num_tokens, top_k = blocks.shape
    num_seqs, max_pages = x.page_table.shape
    max_blocks = max_pages * page_size // block_size
    num_tiles = num_blocks(num_tokens, num_seqs, block_q)
    most_keys = min(max_blocks, block_q * (top_k + 1)) * block_size
    row = triton.cdiv(most_keys, _PAD) * _PAD + _PAD
    named = blocks.new_empty((num_tiles, triton.cdiv(max_blocks, _CHUNK) * _CHUNK))
    slots, sees = (blocks.new_empty((num_tiles, row)) for _ in range(2))
    num_keys = blocks.new_empty(num_tiles)
    bind(_list_kernel, x)[(num_tiles,)](
        is_done=is_done,
        named=named,
        slots=slots,
        sees=sees,
        num_keys=num_keys,
        stride_keys=row,
        BLOCK_Q=block_q,
        QUERIES=triton.next_power_of_2(block_q),
        SIZES=triton.next_power_of_2(block_size),
        PAGE_SIZE=page_size,
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        CHUNK=_CHUNK,
        PAD=_PAD,
        num_warps=8,
    )
    return slots, sees, num_keys


@triton.jit(do_not_specialize=["num_seqs"])
def _list_kernel(
    blocks: tl.tensor,
    cu_seqlens: tl.tensor,
    seq_lens: tl.tensor,
    page_table: tl.tensor,
    is_done: tl.tensor,
    named: tl.tensor,
    slots: tl.tensor,
    sees: tl.tensor,
    num_keys: tl.tensor,
    num_seqs: tl.tensor,
    stride_named: tl.tensor,
    stride_keys: tl.tensor,
    stride_page_table: tl.tensor,
    BLOCK_Q: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIZES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    PAD: tl.constexpr,
) -> None:
    """List the keys of one tile.

    Queries that name a block are gathered by its number, bit by bit; then blocks that have a bit
    are listed, key by key.
    """
    tile = tl.program_id(0)
    seq, _begin, end, first = tokens_of_block(cu_seqlens, num_seqs, tile, BLOCK_Q)
    last = tl.minimum(first + BLOCK_Q, end) - 1
    query = first + tl.arange(0, QUERIES)
    is_query = query <= last
    done = tl.load(is_done + query, mask=is_query, other=1)
    if tl.min(done, 0) > 0:
        tl.store(num_keys + tile, 0)
        return

    ahead = tl.load(seq_lens + seq) - end  # of a token's number, to its position
    first_position, last_position = ahead + first, ahead + last
    end_block = last_position // BLOCK_SIZE + 1
    own_named = named + tile.to(tl.int64) * stride_named
    index = tl.arange(0, CHUNK)
    for base in range(0, end_block, CHUNK):
        tl.store(own_named + base + index, tl.zeros([CHUNK], tl.int32))
    tl.debug_barrier()
    index_k = tl.arange(0, BLOCK_K)
    num_named = tl.cast(0, tl.int32)
    for i in range(last - first + 1):
        bit = tl.cast(1, tl.int32) << i
        own = blocks + (first + i).to(tl.int64) * TOP_K
        name = tl.load(own + index_k, mask=index_k < TOP_K, other=-1)
        tl.atomic_or(own_named + name, bit, mask=name >= 0, sem="relaxed")
        num_named += tl.sum((name >= 0).to(tl.int32), 0)
        tail = first_position + i + 1
        if tail % BLOCK_SIZE > 0:
            tl.atomic_or(own_named + tail // BLOCK_SIZE, bit, sem="relaxed")
    tl.debug_barrier()

    row = tile.to(tl.int64) * stride_keys
    size = tl.arange(0, SIZES)[None, :]
    listed = tl.cast(0, tl.int32)
    for base in range(0, end_block, CHUNK):
        block = base + index
        who = tl.load(own_named + block, mask=block < end_block, other=0, cache_modifier=".cg")
        is_named = (who != 0).to(tl.int32)
        place = listed + tl.cumsum(is_named, 0) - is_named
        listed += tl.sum(is_named, 0)
        key = block[:, None] * BLOCK_SIZE + size
        # A key of a block that is not complete is seen from its own position on.
        later = tl.minimum(tl.maximum(key - first_position, 0), 31)
        who_key = who[:, None] & (tl.full([1, 1], -1, tl.int32) << later)
        mask = (is_named > 0)[:, None] & (size < BLOCK_SIZE)
        page = tl.load(
            page_table + seq * stride_page_table + block * BLOCK_SIZE // PAGE_SIZE,
            mask=is_named > 0,
            other=0,
        )
        slot = page[:, None] * PAGE_SIZE + key % PAGE_SIZE
        p_key = row + place[:, None] * BLOCK_SIZE + size
        tl.store(slots + p_key, tl.where(key <= last_position, slot, -1), mask=mask)
        tl.store(sees + p_key, who_key, mask=mask)
    count = listed * BLOCK_SIZE
    rest = count + tl.arange(0, PAD)
    is_rest = rest < stride_keys
    tl.store(slots + row + rest, tl.full([PAD], -1, tl.int32), mask=is_rest)
    tl.store(sees + row + rest, tl.zeros([PAD], tl.int32), mask=is_rest)
    is_shared = 2 * listed <= num_named
    tl.store(num_keys + tile, tl.where(is_shared, tl.maximum(count, 1), 0))
    tl.store(is_done + query, is_shared.to(tl.int32), mask=is_query & (done == 0))
