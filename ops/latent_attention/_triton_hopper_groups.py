"""Work of each group of warps in ``_triton_hopper_kernel.py``: two compute, one copies.

The first group has the logits, the softmax and the first half of the output; it hands its weights
to the second, which has the second half. So the second's products run beside the first's softmax.
A half of a tile is copied anew as soon as the last product with it is done.
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

from torch_hybrid.ops.triton.hopper import COPIED, finish, products_layout


@gluon.jit
def rows_of_block(block: gl.tuple, BLOCK_H: gl.constexpr, row: gl.tensor) -> gl.tuple:
    """Return token and head of rows, and whether there are such."""
    first_token, end, first_head, num_heads = block
    token = first_token + row // BLOCK_H
    head = first_head + row % BLOCK_H
    return (token, head, (head < num_heads) & (token < end))


@gluon.jit
def copy_latents(
    pages: gl.tuple,
    keys: gl.tuple,
    bars: gl.tuple,
    bufs: gl.tuple,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Copy all tiles, each half as soon as there is room.

    Past the last key, that one is copied again, and hidden.
    """
    pool, table, stride_table_page = pages
    begin, end, num_tiles = keys
    ready, free, _, _, _ = bars
    b_first, b_second, b_rope, _, _ = bufs
    HALF: gl.constexpr = RANK // 2
    index_kv = gl.arange(0, BLOCK_KV, gl.SliceLayout(1, COPIED))
    index_half = gl.arange(0, HALF, gl.SliceLayout(0, COPIED))[None, :]
    index_rope = RANK + gl.arange(0, ROPE, gl.SliceLayout(0, COPIED))[None, :]
    key = gl.minimum(begin + index_kv, end - 1)
    page = gl.load(table + key // PAGE_SIZE * stride_table_page)
    for tile in range(num_tiles):
        slot = page.to(gl.int64) * PAGE_SIZE + key % PAGE_SIZE
        p_row = (pool + slot * (RANK + ROPE))[:, None]
        # Looked up a tile ahead, for the copies to find it here.
        key = gl.minimum(begin + (tile + 1) * BLOCK_KV + index_kv, end - 1)
        page = gl.load(table + key // PAGE_SIZE * stride_table_page)
        stage = tile % STAGES
        before = ((tile // STAGES) & 1) ^ 1
        mbarrier.wait(free.index(2 * stage), before)
        async_copy.async_copy_global_to_shared(b_rope.index(stage), p_row + index_rope)
        async_copy.async_copy_global_to_shared(b_first.index(stage), p_row + index_half)
        async_copy.mbarrier_arrive(ready.index(2 * stage), increment_count=False)
        mbarrier.wait(free.index(2 * stage + 1), before)
        p_second = p_row + (HALF + index_half)
        async_copy.async_copy_global_to_shared(b_second.index(stage), p_second)
        async_copy.mbarrier_arrive(ready.index(2 * stage + 1), increment_count=False)


@gluon.jit
def _products(
    tile: gl.tensor,
    queries: gl.tuple,
    bars: gl.tuple,
    bufs: gl.tuple,
    M: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
) -> gl.tensor:
    """Multiply the queries and a tile of latents, each half once it has arrived.

    With a third part of queries, the rotated one, latents have it beside their first half.
    """
    ready, _, _, _, _ = bars
    b_first, b_second, b_rope, _, _ = bufs
    HAS_ROPE: gl.constexpr = len(queries) == 3
    stage, phase = tile % STAGES, (tile // STAGES) & 1
    zeros = gl.zeros([M, BLOCK_KV], gl.float32, products_layout(BLOCK_KV))
    mbarrier.wait(ready.index(2 * stage), phase)
    fence_async_shared()
    products = zeros
    rope, first = b_rope.index(stage).permute((1, 0)), b_first.index(stage).permute((1, 0))
    if HAS_ROPE:
        products = warpgroup_mma(queries[2], rope, zeros, use_acc=False, is_async=True)
    products = warpgroup_mma(queries[0], first, products, use_acc=HAS_ROPE, is_async=True)
    mbarrier.wait(ready.index(2 * stage + 1), phase)
    fence_async_shared()
    second = b_second.index(stage).permute((1, 0))
    products = warpgroup_mma(queries[1], second, products, is_async=True)
    return warpgroup_mma_wait(0, deps=[products])


@gluon.jit
def attend_first(
    outputs: gl.tuple,
    queries: gl.tuple,
    block: gl.tuple,
    keys: gl.tuple,
    ahead: gl.tensor,
    scale_log2: gl.tensor,
    bars: gl.tuple,
    bufs: gl.tuple,
    BLOCK_H: gl.constexpr,
    M: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Compute the logits and the softmax, and the first half of the output.

    Keys past a row's position, which is ``ahead`` of its token, are hidden; without ``ahead``,
    only those past the last are.
    """
    _, lse, first_row = outputs
    begin, end, num_tiles = keys
    _, free, weights_ready, weights_free, q_ready = bars
    b_first, _, _, b_weights, b_factors = bufs
    L_S: gl.constexpr = products_layout(BLOCK_KV)
    L_O: gl.constexpr = products_layout(HALF)
    row = gl.arange(0, M, gl.SliceLayout(1, L_S))
    token, head, mask = rows_of_block(block, BLOCK_H, row)
    if ahead is not None:
        last = gl.minimum(ahead + token, end - 1)
    peak = gl.full([M], -float("inf"), gl.float32, gl.SliceLayout(1, L_S))
    total = gl.zeros([M], gl.float32, gl.SliceLayout(1, L_S))
    b_o = gl.zeros([M, HALF], gl.float32, L_O)
    mbarrier.wait(q_ready, 0)
    for tile in tl.range(0, num_tiles, disable_licm=True):
        products = _products(tile, queries, bars, bufs, M, BLOCK_KV, STAGES)
        key = begin + tile * BLOCK_KV + gl.arange(0, BLOCK_KV, gl.SliceLayout(0, L_S))
        visible = (key < end)[None, :] if ahead is None else key[None, :] <= last[:, None]
        products = gl.where(visible, products, -float("inf"))
        new_peak = gl.maximum(peak, gl.max(products, 1) * scale_log2)
        shift = gl.where(new_peak == -float("inf"), 0.0, new_peak)  # no key was visible so far
        weights = gl.exp2(products * scale_log2 - shift[:, None])
        rescale = gl.exp2(peak - shift)
        peak = new_peak
        total = total * rescale + gl.sum(weights, 1)

        b_p = weights.to(b_weights.dtype)
        mbarrier.wait(weights_free, (tile & 1) ^ 1)
        b_weights.store(b_p)
        b_factors.store(rescale)
        fence_async_shared()
        mbarrier.arrive(weights_ready, count=1)
        b_o *= gl.convert_layout(rescale, gl.SliceLayout(1, L_O))[:, None]
        b_p = gl.convert_layout(b_p, gl.DotOperandLayout(0, L_O, 2))
        stage = tile % STAGES
        b_sum = warpgroup_mma(b_p, b_first.index(stage), b_o, is_async=True)
        b_o = warpgroup_mma_wait(0, deps=[b_sum])
        mbarrier.arrive(free.index(2 * stage), count=1)

    total, b_lse = finish(peak, total)
    mbarrier.wait(weights_free, (num_tiles & 1) ^ 1)
    b_factors.store(total)
    mbarrier.arrive(weights_ready, count=1)
    gl.store(lse + (first_row + token) * block[3] + head, b_lse, mask=mask)
    total = gl.convert_layout(total, gl.SliceLayout(1, L_O))
    store_half(outputs, block, num_tiles, b_o, total, 0, BLOCK_H, M, HALF)


@gluon.jit
def attend_second(
    outputs: gl.tuple,
    block: gl.tuple,
    keys: gl.tuple,
    bars: gl.tuple,
    bufs: gl.tuple,
    BLOCK_H: gl.constexpr,
    M: gl.constexpr,
    HALF: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Compute the second half of the output, by the first group's weights."""
    _, _, num_tiles = keys
    ready, free, weights_ready, weights_free, _ = bars
    _, b_second, _, b_weights, b_factors = bufs
    L_O: gl.constexpr = products_layout(HALF)
    b_o = gl.zeros([M, HALF], gl.float32, L_O)
    for tile in tl.range(0, num_tiles, disable_licm=True):
        stage = tile % STAGES
        mbarrier.wait(ready.index(2 * stage + 1), (tile // STAGES) & 1)
        mbarrier.wait(weights_ready, tile & 1)
        b_o *= b_factors.load(gl.SliceLayout(1, L_O))[:, None]
        fence_async_shared()
        b_sum = warpgroup_mma(b_weights, b_second.index(stage), b_o, is_async=True)
        b_o = warpgroup_mma_wait(0, deps=[b_sum])
        mbarrier.arrive(weights_free, count=1)
        mbarrier.arrive(free.index(2 * stage + 1), count=1)
    mbarrier.wait(weights_ready, num_tiles & 1)
    total = b_factors.load(gl.SliceLayout(1, L_O))
    store_half(outputs, block, num_tiles, b_o, total, HALF, BLOCK_H, M, HALF)


@gluon.jit
def store_half(
    outputs: gl.tuple,
    block: gl.tuple,
    num_tiles: gl.tensor,
    b_o: gl.tensor,
    total: gl.tensor,
    FIRST: gl.constexpr,
    BLOCK_H: gl.constexpr,
    M: gl.constexpr,
    HALF: gl.constexpr,
) -> None:
    """Store half of the output, from element FIRST on; none where the split has no keys."""
    out, _, first_row = outputs
    L_O: gl.constexpr = products_layout(HALF)
    row = gl.arange(0, M, gl.SliceLayout(1, L_O))
    token, head, mask = rows_of_block(block, BLOCK_H, row)
    index = FIRST + gl.arange(0, HALF, gl.SliceLayout(0, L_O))
    p_out = out + ((first_row + token) * block[3] + head)[:, None] * (2 * HALF) + index[None, :]
    b_o = (b_o / total[:, None]).to(out.dtype.element_ty)
    gl.store(p_out, b_o, mask=mask[:, None] & (num_tiles > 0))
