"""Attention of 64 rows by one group of four warps in ``ops/triton/hopper_kernel.py``.

Two WGMMAs run side by side: queries times a tile's keys, and weights times the values of the tile
before. The softmax runs beside the latter.
"""

from __future__ import annotations

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_hybrid.ops.triton.hopper import finish, products_layout, tiles_in_pages


@gluon.jit
def _scores(
    i: gl.tensor,
    q_bufs: gl.tuple,
    bars: gl.tuple,
    bufs: gl.tuple,
    M: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    REST: gl.constexpr,
    STAGES: gl.constexpr,
    COPIED: gl.constexpr,
) -> gl.tensor:
    """Begin the WGMMA of queries and tile i's keys, once they have arrived.

    With COPIED, threads wrote the tile: WGMMA sees their stores only after a fence.
    """
    k_ready, _, _, _, _ = bars
    b_k, b_k_rest, _ = bufs
    b_q, b_q_rest = q_bufs
    stage = i % STAGES
    zeros = gl.zeros([M, BLOCK_KV], gl.float32, products_layout(BLOCK_KV))
    mbarrier.wait(k_ready.index(stage), (i // STAGES) & 1)
    if COPIED:
        fence_async_shared()
    scores = warpgroup_mma(
        b_q, b_k.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    if REST > 0:
        b_k_rest = b_k_rest.index(stage).permute((1, 0))
        scores = warpgroup_mma(b_q_rest, b_k_rest, scores, is_async=True)
    return scores


@gluon.jit
def _weighted(
    i: gl.tensor,
    b_p: gl.tensor,
    b_o: gl.tensor,
    bars: gl.tuple,
    bufs: gl.tuple,
    STAGES: gl.constexpr,
    COPIED: gl.constexpr,
) -> gl.tensor:
    """Begin to add the weighted values of tile number i, once those have arrived."""
    _, v_ready, _, _, _ = bars
    _, _, b_v = bufs
    stage = i % STAGES
    mbarrier.wait(v_ready.index(stage), (i // STAGES) & 1)
    if COPIED:
        fence_async_shared()
    return warpgroup_mma(b_p, b_v.index(stage), b_o, is_async=True)


@gluon.jit
def _advance(
    scores: gl.tensor,
    key: gl.tensor,
    last: gl.tensor,
    scale_log2: gl.tensor,
    peak: gl.tensor,
    total: gl.tensor,
    HIDES: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Take in a tile of scores, like ``advance`` of ``ops/triton/softmax.py``.

    With HIDES, a row sees keys up to its ``last``.
    """
    if HIDES:
        scores = gl.where(key[None, :] <= last[:, None], scores, -float("inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale_log2)
    shift = new_peak
    if HIDES:
        shift = gl.where(new_peak == -float("inf"), 0.0, new_peak)  # no key was visible so far
    weights = gl.exp2(scores * scale_log2 - shift[:, None])
    rescale = gl.exp2(peak - shift)
    return weights, rescale, new_peak, total * rescale + gl.sum(weights, 1)


@gluon.jit
def _biased(
    i: gl.tensor,
    scores: gl.tensor,
    biases: gl.tuple,
    FIRST_ROW: gl.constexpr,
    M: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
) -> gl.tensor:
    """Add the biases of the i-th tile that has some to its scores."""
    _, b_bias, ready, free, bias_scale = biases
    stage = i % STAGES
    mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
    b_tile = b_bias.index(stage * 2 + FIRST_ROW // M).load(products_layout(BLOCK_KV))
    mbarrier.arrive(free.index(stage), count=1)
    return scores + b_tile.to(gl.float32) * bias_scale


@gluon.jit
def _take_in(
    sums: gl.tuple,
    first: gl.tensor,
    num_tiles: gl.tensor,
    first_key: gl.tensor,
    since: gl.tensor,
    last: gl.tensor,
    scale_log2: gl.tensor,
    q_bufs: gl.tuple,
    bars: gl.tuple,
    bufs: gl.tuple,
    biases: gl.tuple,
    first_biased: gl.tensor,
    M: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    REST: gl.constexpr,
    V: gl.constexpr,
    STAGES: gl.constexpr,
    HIDES: gl.constexpr,
    COPIED: gl.constexpr,
    FIRST_ROW: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    BIASED: gl.constexpr,
) -> gl.tuple:
    """Take in tiles from number ``first`` on, whose keys descend from ``first_key``.

    With BIASED, ``first_biased`` counts the biased tiles before them. ``sums`` lag a tile behind:
    they hold its weights, whose product with the values runs beside the next tile's scores.
    """
    _, v_ready, k_free, v_free, _ = bars
    _, _, b_v = bufs
    L_O: gl.constexpr = products_layout(V)
    index_kv = gl.arange(0, BLOCK_KV, gl.SliceLayout(0, products_layout(BLOCK_KV)))
    b_o, b_p, peak, total = sums
    for tile in tl.range(0, num_tiles, disable_licm=True):
        i = first + tile
        scores = _scores(i, q_bufs, bars, bufs, M, BLOCK_KV, REST, STAGES, COPIED)
        b_sum = _weighted(i - 1, b_p, b_o, bars, bufs, STAGES, COPIED)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_free.index(i % STAGES), count=1)
        key = first_key - tile * BLOCK_KV + index_kv
        if BIASED:
            scores = _biased(first_biased + tile, scores, biases, FIRST_ROW, M, BLOCK_KV, STAGES)
        if HAS_WINDOW:
            scores = gl.where(key[None, :] >= since[:, None], scores, -float("inf"))
        weights, rescale, peak, total = _advance(scores, key, last, scale_log2, peak, total, HIDES)
        if not COPIED:
            # Long past. But a branch: without one, the wait for the products moves before the
            # softmax. Of tiles that threads copy that is the faster order, by 4 to 7 %.
            mbarrier.wait(v_ready.index((i - 1) % STAGES), ((i - 1) // STAGES) & 1)
        b_o = warpgroup_mma_wait(0, deps=[b_sum])
        mbarrier.arrive(v_free.index((i - 1) % STAGES), count=1)
        b_o *= gl.convert_layout(rescale, gl.SliceLayout(1, L_O))[:, None]
        b_p = gl.convert_layout(weights.to(b_v.dtype), gl.DotOperandLayout(0, L_O, 2))
    return (b_o, b_p, peak, total)


@gluon.jit
def attend(
    outputs: gl.tuple,
    q_bufs: gl.tuple,
    block: gl.tuple,
    tiles: gl.tuple,
    num_held: gl.tensor,
    scale_log2: gl.tensor,
    bars: gl.tuple,
    bufs: gl.tuple,
    biases: gl.tuple,
    window: gl.tensor,
    FIRST_ROW: gl.constexpr,
    GROUP: gl.constexpr,
    H: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    M: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    REST: gl.constexpr,
    V: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    PAGED: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    REACH: gl.constexpr,
) -> None:
    """Attend M rows of the block, from FIRST_ROW on, to all tiles, and store outputs and LSEs."""
    out, lse = outputs
    first_token, _, _, ahead = block
    rows_begin, num_rows_tiles, num_whole, keys_end = tiles
    _, v_ready, k_free, _, q_ready = bars
    _, _, b_v = bufs
    L_S: gl.constexpr = products_layout(BLOCK_KV)
    L_O: gl.constexpr = products_layout(V)
    row = FIRST_ROW + gl.arange(0, M, gl.SliceLayout(1, L_S))
    nothing = gl.zeros([M], gl.int32, gl.SliceLayout(1, L_S))
    last = nothing + (keys_end - 1)
    if CAUSAL:
        last = gl.minimum(last, ahead + first_token + row // GROUP)
    since = nothing
    if HAS_WINDOW:
        since = ahead + first_token + row // GROUP - window + 1

    mbarrier.wait(q_ready, 0)
    scores = _scores(0, q_bufs, bars, bufs, M, BLOCK_KV, REST, STAGES, True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_free.index(0), count=1)
    first_key = rows_begin + (num_rows_tiles - 1) * BLOCK_KV
    key = first_key + gl.arange(0, BLOCK_KV, gl.SliceLayout(0, L_S))
    if REACH > 0:
        scores = _biased(0, scores, biases, FIRST_ROW, M, BLOCK_KV, STAGES)
    if HAS_WINDOW:
        scores = gl.where(key[None, :] >= since[:, None], scores, -float("inf"))
    peak = gl.full([M], -float("inf"), gl.float32, gl.SliceLayout(1, L_S))
    total = gl.zeros([M], gl.float32, gl.SliceLayout(1, L_S))
    weights, _, peak, total = _advance(scores, key, last, scale_log2, peak, total, True)
    b_p = gl.convert_layout(weights.to(b_v.dtype), gl.DotOperandLayout(0, L_O, 2))
    sums = (gl.zeros([M, V], gl.float32, L_O), b_p, peak, total)
    # The first tile is copied; the others of rows are not.
    mbarrier.wait(v_ready.index(0), 0)
    fence_async_shared()

    n = num_rows_tiles - num_whole
    num_biased = n
    sums = _take_in(
        sums, 1, n - 1, first_key - BLOCK_KV, since, last, scale_log2, q_bufs, bars, bufs, biases,
        1, M, BLOCK_KV, REST, V, STAGES, True, False, FIRST_ROW, HAS_WINDOW, REACH > 0,
    )  # fmt: skip
    if not HAS_WINDOW:
        sums = _take_in(
            sums, n, num_whole, 0, since, last, scale_log2, q_bufs, bars, bufs, biases, 0,
            M, BLOCK_KV, REST, V, STAGES, False, False, FIRST_ROW, False, False,
        )  # fmt: skip
        n += num_whole
    if PAGED:
        num_left, num_whole = tiles_in_pages(
            num_held, ahead + first_token, window, BLOCK_KV, HAS_WINDOW, REACH
        )
        first_key = (gl.cdiv(num_held, BLOCK_KV) - 1) * BLOCK_KV
        last_held = nothing + (num_held - 1)
        sums = _take_in(
            sums, n, num_left, first_key, since, last_held, scale_log2, q_bufs,
            bars, bufs, biases, num_biased, M, BLOCK_KV, REST, V, STAGES, True, True, FIRST_ROW,
            HAS_WINDOW, REACH > 0,
        )  # fmt: skip
        n += num_left
        if not HAS_WINDOW:
            sums = _take_in(
                sums, n, num_whole, 0, since, last, scale_log2, q_bufs, bars, bufs, biases, 0,
                M, BLOCK_KV, REST, V, STAGES, False, True, FIRST_ROW, False, False,
            )  # fmt: skip
            n += num_whole

    b_o, b_p, peak, total = sums
    b_sum = _weighted(n - 1, b_p, b_o, bars, bufs, STAGES, PAGED)
    total, b_lse = finish(peak, total)
    row_out, mask = _rows_out(block, row, GROUP, H, BLOCK_Q)
    gl.store(lse + row_out, b_lse, mask=mask)
    row = FIRST_ROW + gl.arange(0, M, gl.SliceLayout(1, L_O))
    row_out, mask = _rows_out(block, row, GROUP, H, BLOCK_Q)
    p_out = out + (row_out * V)[:, None]
    p_out += gl.arange(0, V, gl.SliceLayout(0, L_O))[None, :]
    b_o = warpgroup_mma_wait(0, deps=[b_sum])
    b_o /= gl.convert_layout(total, gl.SliceLayout(1, L_O))[:, None]
    gl.store(p_out, b_o.to(out.dtype.element_ty), mask=mask[:, None])


@gluon.jit
def _rows_out(
    block: gl.tuple,
    row: gl.tensor,
    GROUP: gl.constexpr,
    H: gl.constexpr,
    BLOCK_Q: gl.constexpr,
) -> gl.tuple:
    """Return each row's place in [T, H], and whether the row exists."""
    first_token, end, first_head, _ = block
    token = first_token + row // GROUP
    head = first_head + row % GROUP
    return (token.to(gl.int64) * H + head, (row < BLOCK_Q * GROUP) & (token < end))
