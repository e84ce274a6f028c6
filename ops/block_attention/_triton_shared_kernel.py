"""Attention on Hopper of 128 rows, a tile of queries, to the union of their blocks' keys.

As in ``ops/triton/hopper_kernel.py``, two groups of warps have 64 rows each, and a third copies
tiles of keys and values. A key is masked for the rows without a bit in ``sees``.
"""

from __future__ import annotations

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_hybrid.ops.triton.hopper import (
    COPIED,
    COPYING_THREADS,
    ROWS,
    finish,
    new_barriers,
    products_layout,
    sequence_of_block,
)
from torch_hybrid.ops.triton.hopper_copies import copy_queries


@gluon.jit
def _copy_listed(
    keys: gl.tuple,
    num_tiles: gl.tensor,
    bars: gl.tuple,
    bufs: gl.tuple,
    ROW: gl.constexpr,
    D: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Copy all tiles of listed keys and values, each as soon as its pipeline stage is free."""
    p_keys, p_values, slots = keys
    k_ready, v_ready, k_free, v_free, _ = bars
    b_k, b_v = bufs
    index_kv = gl.arange(0, BLOCK_KV, gl.SliceLayout(1, COPIED))
    index_d = gl.arange(0, D, gl.SliceLayout(0, COPIED))[None, :]
    slot = gl.load(slots + index_kv)
    for i in range(num_tiles):
        row, mask = (slot.to(gl.int64) * ROW)[:, None], (slot >= 0)[:, None]
        # Looked up a tile ahead, for the copies to find it here.
        slot = gl.load(slots + (i + 1) * BLOCK_KV + index_kv)
        stage = i % STAGES
        before = ((i // STAGES) & 1) ^ 1
        mbarrier.wait(k_free.index(stage), before)
        p_row = p_keys + row
        async_copy.async_copy_global_to_shared(b_k.index(stage), p_row + index_d, mask=mask)
        async_copy.mbarrier_arrive(k_ready.index(stage), increment_count=False)
        mbarrier.wait(v_free.index(stage), before)
        p_row = p_values + row
        async_copy.async_copy_global_to_shared(b_v.index(stage), p_row + index_d, mask=mask)
        async_copy.mbarrier_arrive(v_ready.index(stage), increment_count=False)


@gluon.jit
def _scores(
    i: gl.tensor,
    b_q: gl.shared_memory_descriptor,
    bars: gl.tuple,
    bufs: gl.tuple,
    M: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
) -> gl.tensor:
    """Begin the WGMMA of queries and tile i's keys, once they have arrived."""
    k_ready, _, _, _, _ = bars
    b_k, _ = bufs
    zeros = gl.zeros([M, BLOCK_KV], gl.float32, products_layout(BLOCK_KV))
    mbarrier.wait(k_ready.index(i % STAGES), (i // STAGES) & 1)
    fence_async_shared()
    b_k_tile = b_k.index(i % STAGES).permute((1, 0))
    return warpgroup_mma(b_q, b_k_tile, zeros, use_acc=False, is_async=True)


@gluon.jit
def _weighted(
    i: gl.tensor,
    b_p: gl.tensor,
    b_o: gl.tensor,
    bars: gl.tuple,
    bufs: gl.tuple,
    STAGES: gl.constexpr,
) -> gl.tensor:
    """Begin to add tile i's weighted values, once they have arrived."""
    _, v_ready, _, _, _ = bars
    _, b_v = bufs
    mbarrier.wait(v_ready.index(i % STAGES), (i // STAGES) & 1)
    fence_async_shared()
    return warpgroup_mma(b_p, b_v.index(i % STAGES), b_o, is_async=True)


@gluon.jit
def _advance(
    scores: gl.tensor,
    seen: gl.tensor,
    bit: gl.tensor,
    scale_log2: gl.tensor,
    peak: gl.tensor,
    total: gl.tensor,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Take in a tile of scores, like ``advance`` of ``ops/triton/softmax.py``.

    A row sees the keys that have its bit.
    """
    scores = gl.where((seen[None, :] & bit[:, None]) != 0, scores, -float("inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale_log2)
    shift = gl.where(new_peak == -float("inf"), 0.0, new_peak)  # no key was visible so far
    weights = gl.exp2(scores * scale_log2 - shift[:, None])
    rescale = gl.exp2(peak - shift)
    return weights, rescale, new_peak, total * rescale + gl.sum(weights, 1)


@gluon.jit
def _attend_listed(
    out: gl.tensor,
    b_q: gl.shared_memory_descriptor,
    block: gl.tuple,
    sees: gl.tensor,
    num_tiles: gl.tensor,
    scale_log2: gl.tensor,
    bars: gl.tuple,
    bufs: gl.tuple,
    FIRST_ROW: gl.constexpr,
    GROUP: gl.constexpr,
    H: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    M: gl.constexpr,
    D: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Attend M rows of the tile, from FIRST_ROW on, to all listed keys, and store the outputs.

    The values of a tile are added beside the products of the next.
    """
    _, _, k_free, v_free, q_ready = bars
    _, b_v = bufs
    L_S: gl.constexpr = products_layout(BLOCK_KV)
    L_O: gl.constexpr = products_layout(D)
    index_kv = gl.arange(0, BLOCK_KV, gl.SliceLayout(0, L_S))
    row = FIRST_ROW + gl.arange(0, M, gl.SliceLayout(1, L_S))
    bit = gl.full([M], 1, gl.int32, gl.SliceLayout(1, L_S)) << (row // GROUP)
    peak = gl.full([M], -float("inf"), gl.float32, gl.SliceLayout(1, L_S))
    total = gl.zeros([M], gl.float32, gl.SliceLayout(1, L_S))
    b_o = gl.zeros([M, D], gl.float32, L_O)

    mbarrier.wait(q_ready, 0)
    seen = gl.load(sees + index_kv)
    scores = _scores(0, b_q, bars, bufs, M, BLOCK_KV, STAGES)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_free.index(0), count=1)
    weights, _, peak, total = _advance(scores, seen, bit, scale_log2, peak, total)
    b_p = gl.convert_layout(weights.to(b_v.dtype), gl.DotOperandLayout(0, L_O, 2))
    for tile in tl.range(0, num_tiles - 1, disable_licm=True):
        i = tile + 1
        seen = gl.load(sees + i * BLOCK_KV + index_kv)
        scores = _scores(i, b_q, bars, bufs, M, BLOCK_KV, STAGES)
        b_sum = _weighted(tile, b_p, b_o, bars, bufs, STAGES)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_free.index(i % STAGES), count=1)
        weights, rescale, peak, total = _advance(scores, seen, bit, scale_log2, peak, total)
        b_o = warpgroup_mma_wait(0, deps=[b_sum])
        mbarrier.arrive(v_free.index(tile % STAGES), count=1)
        b_o *= gl.convert_layout(rescale, gl.SliceLayout(1, L_O))[:, None]
        b_p = gl.convert_layout(weights.to(b_v.dtype), gl.DotOperandLayout(0, L_O, 2))

    b_sum = _weighted(num_tiles - 1, b_p, b_o, bars, bufs, STAGES)
    total, _ = finish(peak, total)
    row = FIRST_ROW + gl.arange(0, M, gl.SliceLayout(1, L_O))
    first_token, end, first_head = block
    token = first_token + row // GROUP
    mask = (row < BLOCK_Q * GROUP) & (token < end)
    row_out = token.to(gl.int64) * H + first_head + row % GROUP
    p_out = out + (row_out * D)[:, None] + gl.arange(0, D, gl.SliceLayout(0, L_O))[None, :]
    b_o = warpgroup_mma_wait(0, deps=[b_sum])
    b_o /= gl.convert_layout(total, gl.SliceLayout(1, L_O))[:, None]
    gl.store(p_out, b_o.to(out.dtype.element_ty), mask=mask[:, None])


@gluon.jit(do_not_specialize=["num_seqs"])
def hopper_shared_kernel(
    q: gl.tensor,
    kv: gl.tensor,
    slots: gl.tensor,
    sees: gl.tensor,
    num_keys: gl.tensor,
    cu_seqlens: gl.tensor,
    out: gl.tensor,
    scale_log2: gl.tensor,
    num_seqs: gl.tensor,
    stride_keys: gl.tensor,
    stride_q_token: gl.tensor,
    stride_q_head: gl.tensor,
    stride_kv: gl.tensor,
    H: gl.constexpr,
    HK: gl.constexpr,
    D: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
) -> None:
    """Attend a tile of BLOCK_Q tokens, in the query heads of one key head, to its listed keys.

    Grid: tiles times key heads, last tiles first. Tile: 128 rows (tokens times heads), 64 a
    computing group, by BLOCK_KV keys. Pipeline: STAGES tiles of keys and values in shared memory,
    which copying warps fill (``cp.async``) and WGMMA reads. Registers: a group's scores and
    outputs; REGISTERS and COPY_REGISTERS a thread of the other warps. Tiles without keys write
    nothing.
    """
    GROUP: gl.constexpr = H // HK
    M: gl.constexpr = 64
    # The last tiles of a sequence see the most keys: they start first.
    tile = (gl.num_programs(0) - 1 - gl.program_id(0)) // HK
    head_k = gl.program_id(0) % HK
    count = gl.load(num_keys + tile)
    if count > 0:
        seq = sequence_of_block(cu_seqlens, num_seqs, tile, BLOCK_Q)
        begin = gl.load(cu_seqlens + seq)
        end = gl.load(cu_seqlens + seq + 1)
        first_token = begin + (tile - begin // BLOCK_Q - seq) * BLOCK_Q
        queries = (q, stride_q_token, stride_q_head, head_k * GROUP, first_token, end)
        q_first, _ = copy_queries(queries, 0, GROUP, BLOCK_Q, M, D, 0)
        q_second, _ = copy_queries(queries, M, GROUP, BLOCK_Q, M, D, 0)
        q_ready = new_barriers(1, COPYING_THREADS).index(0)
        async_copy.mbarrier_arrive(q_ready, increment_count=False)

        dtype: gl.constexpr = q.dtype.element_ty
        b_k = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_KV, D], ROWS)
        b_v = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_KV, D], ROWS)
        k_ready = new_barriers(STAGES, COPYING_THREADS)
        v_ready = new_barriers(STAGES, COPYING_THREADS)
        bars = (k_ready, v_ready, new_barriers(STAGES, 2), new_barriers(STAGES, 2), q_ready)
        bufs = (b_k, b_v)
        block = (first_token, end, head_k * GROUP)
        row = tile.to(gl.int64) * stride_keys
        head_keys = kv + head_k * D
        keys = (head_keys, head_keys + stride_kv, slots + row)
        num_tiles = gl.cdiv(count, BLOCK_KV)
        gl.warp_specialize(
            [
                (_attend_listed, (out, q_first, block, sees + row, num_tiles, scale_log2, bars,
                                  bufs, 0, GROUP, H, BLOCK_Q, M, D, BLOCK_KV, STAGES)),
                (_attend_listed, (out, q_second, block, sees + row, num_tiles, scale_log2, bars,
                                  bufs, M, GROUP, H, BLOCK_Q, M, D, BLOCK_KV, STAGES)),
                (_copy_listed, (keys, num_tiles, bars, bufs, HK * D, D, BLOCK_KV, STAGES)),
            ],
            [4, 4],
            [REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
