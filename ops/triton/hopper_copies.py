"""Copies of queries, keys and values to shared memory in ``ops/triton/hopper_kernel.py``.

TMA fetches a tile of this step's rows by one instruction. It knows where a tensor ends, not a
sequence. So threads copy the tile that may hold a sequence's end, the first, row by row, with 0
past the end; tiles in pages, too.
"""

from __future__ import annotations

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from torch_hybrid.ops.triton.hopper import (
    BIASES,
    COPIED,
    COPYING_THREADS,
    ROWS,
    tiles_in_pages,
)


@gluon.jit
def copy_queries(
    queries: gl.tuple,
    FIRST_ROW: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    M: gl.constexpr,
    D: gl.constexpr,
    REST: gl.constexpr,
) -> gl.tuple:
    """Begin to copy M query rows (tokens times heads) to shared memory: their first D dims, and the
    REST.

    Rows without a token become 0.
    """
    q, stride_token, stride_head, first_head, first_token, end = queries
    row = FIRST_ROW + gl.arange(0, M, gl.SliceLayout(1, COPIED))
    token = first_token + row // GROUP
    mask = ((row < BLOCK_Q * GROUP) & (token < end))[:, None]
    head = first_head + row % GROUP
    p_row = (q + token.to(gl.int64) * stride_token + head * stride_head)[:, None]
    b_q = gl.allocate_shared_memory(q.dtype.element_ty, [M, D], ROWS)
    index_d = gl.arange(0, D, gl.SliceLayout(0, COPIED))[None, :]
    async_copy.async_copy_global_to_shared(b_q, p_row + index_d, mask=mask)
    b_rest = b_q
    if REST > 0:
        b_rest = gl.allocate_shared_memory(q.dtype.element_ty, [M, REST], ROWS)
        index_rest = D + gl.arange(0, REST, gl.SliceLayout(0, COPIED))[None, :]
        async_copy.async_copy_global_to_shared(b_rest, p_row + index_rest, mask=mask)
    return (b_q, b_rest)


@gluon.jit
def copy_keys_and_values(
    rows: gl.tuple,
    boxes: gl.tuple,
    pages: gl.tuple,
    tiles: gl.tuple,
    bars: gl.tuple,
    bufs: gl.tuple,
    block: gl.tuple,
    biases: gl.tuple,
    window: gl.tensor,
    GROUP: gl.constexpr,
    H: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    D: gl.constexpr,
    REST: gl.constexpr,
    V: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    REACH: gl.constexpr,
) -> None:
    """Copy all tiles of keys and values, and their biases, each as soon as its pipeline stage is
    free."""
    keys, values, stride_k, stride_v, row_of_key_0 = rows
    held_keys, held_values, stride_held, table, stride_table_page, held_begin, num_held = pages
    rows_begin, num_rows_tiles, num_whole, keys_end = tiles
    num_biased = num_rows_tiles - num_whole
    index_kv = gl.arange(0, BLOCK_KV, gl.SliceLayout(1, COPIED))
    first_key = rows_begin + (num_rows_tiles - 1) * BLOCK_KV
    key = first_key + index_kv
    place = (row_of_key_0 + key).to(gl.int64)
    p_k, p_v = keys + place * stride_k, values + place * stride_v
    _copy_tile(0, p_k, p_v, key < keys_end, bars, bufs, D, REST, V, STAGES)
    if REACH > 0:
        _copy_biases(0, first_key, block, biases, GROUP, H, BLOCK_Q, BLOCK_KV, STAGES, REACH)
    for i in range(1, num_rows_tiles):
        begin = first_key - i * BLOCK_KV
        _fetch_tile(i, row_of_key_0 + begin, boxes, bars, bufs, D, REST, V, BLOCK_KV, STAGES)
        if REACH > 0 and i < num_biased:
            _copy_biases(i, begin, block, biases, GROUP, H, BLOCK_Q, BLOCK_KV, STAGES, REACH)
    if PAGE_SIZE > 0:
        # What is before a window is hidden by those who compute: its first row is read instead.
        end_tile = gl.cdiv(num_held, BLOCK_KV)
        first_token, _, _, ahead = block
        num_left, num_held_whole = tiles_in_pages(
            num_held, ahead + first_token, window, BLOCK_KV, HAS_WINDOW, REACH
        )
        key = gl.maximum((end_tile - 1) * BLOCK_KV + index_kv, held_begin)
        p_page = table + key // PAGE_SIZE * stride_table_page
        page = gl.load(p_page, mask=key < num_held, other=0)
        for i in range(num_left + num_held_whole):
            key = gl.maximum((end_tile - 1 - i) * BLOCK_KV + index_kv, held_begin)
            slot = (page.to(gl.int64) * PAGE_SIZE + key % PAGE_SIZE) * stride_held
            is_key = key < num_held
            # Looked up a tile ahead, for the copies to find it here.
            key = gl.maximum(key - BLOCK_KV, held_begin)
            page = gl.load(table + key // PAGE_SIZE * stride_table_page)
            p_k, p_v = held_keys + slot, held_values + slot
            _copy_tile(num_rows_tiles + i, p_k, p_v, is_key, bars, bufs, D, REST, V, STAGES)
            if REACH > 0 and i < num_left:
                n, begin = num_biased + i, (end_tile - 1 - i) * BLOCK_KV
                _copy_biases(n, begin, block, biases, GROUP, H, BLOCK_Q, BLOCK_KV, STAGES, REACH)


@gluon.jit
def _copy_tile(
    i: gl.tensor,
    p_k: gl.tensor,
    p_v: gl.tensor,
    is_key: gl.tensor,
    bars: gl.tuple,
    bufs: gl.tuple,
    D: gl.constexpr,
    REST: gl.constexpr,
    V: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Copy tile number i from rows that begin at ``p_k`` and ``p_v``; a row without a key becomes
    0."""
    k_ready, v_ready, k_free, v_free, _ = bars
    b_k, b_rest, b_v = bufs
    stage = i % STAGES
    before = ((i // STAGES) & 1) ^ 1
    mask = is_key[:, None]
    index_d = gl.arange(0, D, gl.SliceLayout(0, COPIED))[None, :]
    mbarrier.wait(k_free.index(stage), before)
    async_copy.async_copy_global_to_shared(b_k.index(stage), p_k[:, None] + index_d, mask=mask)
    if REST > 0:
        index_rest = D + gl.arange(0, REST, gl.SliceLayout(0, COPIED))[None, :]
        p_rest = p_k[:, None] + index_rest
        async_copy.async_copy_global_to_shared(b_rest.index(stage), p_rest, mask=mask)
    async_copy.mbarrier_arrive(k_ready.index(stage), increment_count=False)
    index_v = gl.arange(0, V, gl.SliceLayout(0, COPIED))[None, :]
    mbarrier.wait(v_free.index(stage), before)
    async_copy.async_copy_global_to_shared(b_v.index(stage), p_v[:, None] + index_v, mask=mask)
    async_copy.mbarrier_arrive(v_ready.index(stage), increment_count=False)


@gluon.jit
def _fetch_tile(
    i: gl.tensor,
    row: gl.tensor,
    boxes: gl.tuple,
    bars: gl.tuple,
    bufs: gl.tuple,
    D: gl.constexpr,
    REST: gl.constexpr,
    V: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Fetch tile number i by TMA: keys and values from ``row`` on, all of one sequence."""
    k_ready, v_ready, k_free, v_free, _ = bars
    b_k, b_rest, b_v = bufs
    box_k, box_rest, box_v, column_k, column_v = boxes
    stage = i % STAGES
    before = ((i // STAGES) & 1) ^ 1
    ready = k_ready.index(stage)
    mbarrier.wait(k_free.index(stage), before)
    mbarrier.expect(ready, BLOCK_KV * (D + REST) * b_k.dtype.primitive_bitwidth // 8)
    tma.async_copy_global_to_shared(box_k, [row, column_k], ready, b_k.index(stage))
    if REST > 0:
        tma.async_copy_global_to_shared(box_rest, [row, column_k + D], ready, b_rest.index(stage))
    # What is expected counts as one that arrives; a tile that is copied has all threads arrive.
    mbarrier.arrive(ready, count=COPYING_THREADS - 1)
    ready = v_ready.index(stage)
    mbarrier.wait(v_free.index(stage), before)
    mbarrier.expect(ready, BLOCK_KV * V * b_v.dtype.primitive_bitwidth // 8)
    tma.async_copy_global_to_shared(box_v, [row, column_v], ready, b_v.index(stage))
    mbarrier.arrive(ready, count=COPYING_THREADS - 1)


@gluon.jit
def _copy_biases(
    i: gl.tensor,
    first_key: gl.tensor,
    block: gl.tuple,
    biases: gl.tuple,
    GROUP: gl.constexpr,
    H: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
    REACH: gl.constexpr,
) -> None:
    """Copy the biases of the i-th tile that has some, whose keys begin at ``first_key``.

    A row of the tensor holds biases by distance; the copy has them by key, in reverse.
    """
    first_token, end, first_head, ahead = block
    relative_bias, b_bias, ready, free, _ = biases
    M: gl.constexpr = b_bias.shape[1]
    PART: gl.constexpr = 32 * 128 // BLOCK_KV  # rows that are on their way at once
    stage = i % STAGES
    index_kv = gl.arange(0, BLOCK_KV, gl.SliceLayout(0, BIASES))
    mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
    for half in tl.range(0, 2, disable_licm=True):
        for part in gl.static_range(M // PART):
            row = half * M + part * PART + gl.arange(0, PART, gl.SliceLayout(1, BIASES))
            token = first_token + row // GROUP
            is_row = (row < BLOCK_Q * GROUP) & (token < end)
            distance = ahead + token - first_key  # of the tile's first key
            p_row = (token.to(gl.int64) * H + first_head + row % GROUP) * REACH + distance
            distance = gl.where(is_row, distance, -1)[:, None] - index_kv[None, :]
            is_near = (distance >= 0) & (distance < REACH)
            p_part = relative_bias + p_row[:, None] - index_kv[None, :]
            b_part = gl.load(p_part, mask=is_near, other=0.0)
            b_bias.index(stage * 2 + half).slice(part * PART, PART).store(b_part)
    mbarrier.arrive(ready.index(stage), count=1)
