"""Attention of 128 rows to keys on Hopper, with warps that copy and two groups that compute.

Each group of four warps computes 64 rows (``hopper_rows.py``); the copying warps keep STAGES tiles
in flight (``hopper_copies.py``). Barriers say when a tile's keys or values have arrived
(``ready``), and when both groups are done with them (``free``).

Tiles go from the last key to the first, this step's rows before the pages: the first tile may need
a mask, and always exists.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

from torch_hybrid.ops.triton.hopper import COPYING_THREADS, ROWS, new_barriers, sequence_of_block
from torch_hybrid.ops.triton.hopper_copies import copy_keys_and_values, copy_queries
from torch_hybrid.ops.triton.hopper_rows import attend

_LOG2_E = gl.constexpr(math.log2(math.e))


@gluon.jit(do_not_specialize=["num_seqs", "stride_page_table", "window"])
def hopper_attend_kernel(
    q: gl.tensor,
    k: gl.tensor,
    v: gl.tensor,
    box_k: tma.tensor_descriptor,
    box_k_rest: tma.tensor_descriptor,
    box_v: tma.tensor_descriptor,
    kv: gl.tensor,
    cu_seqlens: gl.tensor,
    cu_seqlens_k: gl.tensor,
    seq_lens: gl.tensor,
    page_table: gl.tensor,
    wanted: gl.tensor,
    relative_bias: gl.tensor,
    out: gl.tensor,
    lse: gl.tensor,
    scale_log2: gl.tensor,
    window: gl.tensor,
    num_seqs: gl.tensor,
    stride_q_token: gl.tensor,
    stride_q_head: gl.tensor,
    stride_k_token: gl.tensor,
    stride_k_head: gl.tensor,
    stride_v_token: gl.tensor,
    stride_v_head: gl.tensor,
    stride_kv: gl.tensor,
    stride_page_table: gl.tensor,
    stride_table_page: gl.tensor,
    H: gl.constexpr,
    HK: gl.constexpr,
    HEADS: gl.constexpr,
    D: gl.constexpr,
    REST: gl.constexpr,
    V: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    REACH: gl.constexpr,
    REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
) -> None:
    """Attend a block of tokens, in the query heads of one key head, to its sequence's keys.

    Grid: blocks times key heads, last blocks first, HEADS heads side by side. Tile: 128 rows
    (tokens times heads), 64 a computing group, by BLOCK_KV keys. Pipeline: STAGES tiles of keys and
    values in shared memory, which TMA and copying warps fill and WGMMA reads. Registers: a group's
    scores and outputs; REGISTERS a thread of the second group, COPY_REGISTERS a copying thread.

    A key counts by its position in the sequence; earlier steps' keys lie in pages of PAGE_SIZE, if
    it is not 0. With ``wanted``, blocks without a wanted token write nothing. Rows have biases for
    distances below REACH.
    """
    GROUP: gl.constexpr = H // HK
    M: gl.constexpr = 64
    # The last blocks of a sequence see the most keys: they start first, those of HEADS heads.
    num_blocks = gl.num_programs(0) // HK
    place = gl.program_id(0) % (num_blocks * HEADS)
    head_k = gl.program_id(0) // (num_blocks * HEADS) * HEADS + place % HEADS
    block = num_blocks - 1 - place // HEADS
    seq = sequence_of_block(cu_seqlens, num_seqs, block, BLOCK_Q)
    begin = gl.load(cu_seqlens + seq)
    end = gl.load(cu_seqlens + seq + 1)
    first_token = begin + (block - begin // BLOCK_Q - seq) * BLOCK_Q
    is_block = first_token < end
    if wanted is not None:
        token = first_token + gl.arange(0, 2 * M, gl.BlockedLayout([1], [32], [4], [0]))
        is_token = token < gl.minimum(first_token + BLOCK_Q, end)
        b_wanted = gl.load(wanted + token, mask=is_token, other=0)
        is_block = is_block & (gl.max(b_wanted, 0) > 0)
    if is_block:
        queries = (q, stride_q_token, stride_q_head, head_k * GROUP, first_token, end)
        q_first = copy_queries(queries, 0, GROUP, BLOCK_Q, M, D, REST)
        q_second = copy_queries(queries, M, GROUP, BLOCK_Q, M, D, REST)
        q_ready = new_barriers(1, COPYING_THREADS).index(0)
        async_copy.mbarrier_arrive(q_ready, increment_count=False)

        if PAGE_SIZE > 0:
            num_keys = gl.load(seq_lens + seq)
            num_held = num_keys - (end - begin)
            row_of_key_0 = begin - num_held
            held_keys = kv + head_k * D
            table = page_table + seq.to(gl.int64) * stride_page_table
        else:
            row_of_key_0 = gl.load(cu_seqlens_k + seq)
            num_keys = gl.load(cu_seqlens_k + seq + 1) - row_of_key_0
            num_held = 0
            held_keys = k
            table = cu_seqlens
        ahead = num_keys - end  # of a token's number, to its position
        keys_end, seen_by_all = num_keys, num_keys
        if CAUSAL:
            keys_end = gl.maximum(0, ahead + gl.minimum(first_token + BLOCK_Q, end))
            seen_by_all = gl.maximum(0, ahead + first_token + 1)
        held_begin, rows_begin = 0, num_held
        if HAS_WINDOW:  # no row sees what is before, and pages may be somebody else's
            seen_begin = gl.maximum(0, ahead + first_token - window + 1)
            held_begin = gl.minimum(seen_begin, num_held)
            rows_begin = gl.maximum(seen_begin, num_held)
            seen_by_all = 0
        if REACH > 0:  # and what no row has biases of
            seen_by_all = gl.minimum(seen_by_all, gl.maximum(0, ahead + first_token - REACH + 1))
        num_tiles = gl.maximum(1, gl.cdiv(keys_end - rows_begin, BLOCK_KV))
        num_whole = gl.maximum(0, gl.minimum((seen_by_all - rows_begin) // BLOCK_KV, num_tiles - 1))
        tiles = (rows_begin, num_tiles, num_whole, keys_end)
        pages = (
            held_keys,
            held_keys + stride_kv,
            HK * D,
            table,
            stride_table_page,
            held_begin,
            num_held,
        )
        rows_k, rows_v = k + head_k * stride_k_head, v + head_k * stride_v_head
        rows = (rows_k, rows_v, stride_k_token, stride_v_token, row_of_key_0)

        columns_k, columns_v = head_k * stride_k_head, head_k * stride_v_head
        boxes = (box_k, box_k_rest, box_v, columns_k, columns_v)
        dtype: gl.constexpr = q.dtype.element_ty
        b_k = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_KV, D], ROWS)
        b_v = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_KV, V], ROWS)
        b_k_rest = b_k
        if REST > 0:
            b_k_rest = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_KV, REST], ROWS)
        k_ready = new_barriers(STAGES, COPYING_THREADS)
        v_ready = new_barriers(STAGES, COPYING_THREADS)
        bars = (k_ready, v_ready, new_barriers(STAGES, 2), new_barriers(STAGES, 2), q_ready)
        bufs = (b_k, b_k_rest, b_v)
        outputs = (out, lse)
        block_of = (first_token, end, head_k * GROUP, ahead)
        biases = ()
        if REACH > 0:
            b_bias = gl.allocate_shared_memory(dtype, [STAGES * 2, M, BLOCK_KV], ROWS)
            ready, free = new_barriers(STAGES, 1), new_barriers(STAGES, 2)
            biases = (relative_bias, b_bias, ready, free, _LOG2_E / scale_log2)  # type: ignore[assignment]
        gl.warp_specialize(
            [
                (attend, (outputs, q_first, block_of, tiles, num_held, scale_log2, bars, bufs,
                          biases, window, 0, GROUP, H, BLOCK_Q, M, BLOCK_KV, REST, V, STAGES,
                          CAUSAL, PAGE_SIZE > 0, HAS_WINDOW, REACH)),
                (attend, (outputs, q_second, block_of, tiles, num_held, scale_log2, bars, bufs,
                          biases, window, M, GROUP, H, BLOCK_Q, M, BLOCK_KV, REST, V, STAGES,
                          CAUSAL, PAGE_SIZE > 0, HAS_WINDOW, REACH)),
                (copy_keys_and_values, (rows, boxes, pages, tiles, bars, bufs, block_of, biases,
                                        window, GROUP, H, BLOCK_Q, D, REST, V, BLOCK_KV, STAGES,
                                        PAGE_SIZE, HAS_WINDOW, REACH)),
            ],
            [4, 4],
            [REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
