"""Attention of a block of queries to keys, tile by tile: in pages, or in rows one after another."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_hybrid.ops.triton.fp8 import widen
from torch_hybrid.ops.triton.relative_bias import with_biases
from torch_hybrid.ops.triton.softmax import advance, tanh


@triton.jit
def attend_to_keys(
    b_o: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    b_q: tl.tensor,
    position: tl.tensor,
    first_key: tl.tensor,
    num_tiles: tl.tensor,
    keys_end: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    scale_log2: tl.tensor,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    HIDES: tl.constexpr,
    FLOAT32_PRODUCTS: tl.constexpr,
    b_q_rest: tl.tensor = None,
    q_worth: tl.tensor = None,
    table: tl.tensor = None,
    stride_table_page: tl.tensor = 0,
    window: tl.tensor = 0,
    cap_scale: tl.tensor = 1.0,
    PAGE_SIZE: tl.constexpr = 0,
    BLOCK_D_REST: tl.constexpr = 0,
    HAS_WINDOW: tl.constexpr = False,
    HAS_SOFTCAP: tl.constexpr = False,
    biases: tl.tensor = None,
    REACH: tl.constexpr = 0,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take in tiles of keys and values of one head.

    Args:
        b_o: [BLOCK_M, BLOCK_V] sums of weighted values so far.
        peak, total: [BLOCK_M] as ``advance`` has them.
        b_q, b_q_rest: [BLOCK_M, BLOCK_D] and [BLOCK_M, BLOCK_D_REST], the first dims of the
            queries and those that are left of D.
        q_worth: [BLOCK_M], what products with a row are to be multiplied by.
        position: [BLOCK_M], of the last key that each row sees.
        first_key, num_tiles: where the tiles start, and how many; in pages a multiple of BLOCK_KV
            unless it HAS_WINDOW.
        keys_end: no key from here on is read.
        keys, values: where the row of key 0 is, in page 0 where there is a ``table``; numbers of 8
            bits are widened, and what their scales are is left to the caller.
        stride_k, stride_v: elements from one row to the next.
        table: of pages of PAGE_SIZE rows; without one, rows lie one after another.
        window: keys that a row sees, its own included, if it HAS_WINDOW.
        scale_log2: as ``advance`` takes it; of tanh(cap_scale * products) if it HAS_SOFTCAP.
        biases: of each row by distance, as ``with_biases`` takes them with REACH.
        HIDES: some row does not see some of these keys, or they do not fill their tiles.

    Returns:
        ``b_o``, ``peak`` and ``total``.
    """
    index_kv = tl.arange(0, BLOCK_KV)
    index_d = tl.arange(0, BLOCK_D)[None, :]
    index_v = tl.arange(0, BLOCK_V)[None, :]
    unit = scale_log2 if biases is None else 1.0  # logits to base 2 of what is summed
    # Tiles are counted from 0: with another lower bound the compiler loses sight of the
    # alignment of what is loaded, and loads element by element.
    for tile in range(num_tiles):
        first = first_key + tile * BLOCK_KV
        key = first + index_kv
        is_key = (key < keys_end) | (not HIDES)
        if table is None:
            if BLOCK_D <= 128 and BLOCK_KV > 32:
                # Registers are left for the offsets within a tile, which stay the same.
                p_k = keys + tl.cast(first, tl.int64) * stride_k + index_kv[:, None] * stride_k
                p_v = values + tl.cast(first, tl.int64) * stride_v + index_kv[:, None] * stride_v
            else:
                p_k = keys + key.to(tl.int64)[:, None] * stride_k
                p_v = values + key.to(tl.int64)[:, None] * stride_v
        elif PAGE_SIZE % BLOCK_KV == 0 and not HAS_WINDOW:  # a tile lies in one page
            page = tl.load(table + first // PAGE_SIZE * stride_table_page)
            slot = page.to(tl.int64) * PAGE_SIZE + first % PAGE_SIZE
            p_k = keys + slot * stride_k + index_kv[:, None] * stride_k
            p_v = values + slot * stride_v + index_kv[:, None] * stride_v
        else:
            page = tl.load(table + key // PAGE_SIZE * stride_table_page, mask=is_key, other=0)
            slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
            p_k = keys + slot[:, None] * stride_k
            p_v = values + slot[:, None] * stride_v
        mask_k = is_key[:, None] & ((index_d < D) | (D >= BLOCK_D))
        mask_v = is_key[:, None] & ((index_v < V) | (V == BLOCK_V))
        b_k = tl.load(p_k + index_d, mask=mask_k, other=0.0)
        b_v = tl.load(p_v + index_v, mask=mask_v, other=0.0)
        if b_k.dtype.primitive_bitwidth == 8:
            b_k = widen(b_k, b_q.dtype)
            b_v = widen(b_v, b_q.dtype)
        elif FLOAT32_PRODUCTS:
            b_k = b_k.to(tl.float32)
            b_v = b_v.to(tl.float32)
        products = tl.dot(b_q, tl.trans(b_k), out_dtype=tl.float32, input_precision="ieee")
        if BLOCK_D_REST > 0:
            index_rest = BLOCK_D + tl.arange(0, BLOCK_D_REST)[None, :]
            mask_rest = is_key[:, None] & ((index_rest < D) | (D == BLOCK_D + BLOCK_D_REST))
            b_k_rest = tl.load(p_k + index_rest, mask=mask_rest, other=0.0)
            if FLOAT32_PRODUCTS:
                b_k_rest = b_k_rest.to(tl.float32)
            products = tl.dot(b_q_rest, tl.trans(b_k_rest), products, input_precision="ieee")
        if q_worth is not None:
            products *= q_worth[:, None]

        if HAS_SOFTCAP:
            products = tanh(products * cap_scale)
        if biases is not None:
            products = with_biases(products, scale_log2, biases, position, key, REACH)
        if HIDES:
            visible = (key[None, :] <= position[:, None]) & is_key[None, :]
            if HAS_WINDOW:
                visible &= key[None, :] > position[:, None] - window
            products = tl.where(visible, products, -float("inf"))
        weights, rescale, peak, total = advance(products, unit, peak, total)
        b_o *= rescale[:, None]
        b_o = tl.dot(weights.to(b_v.dtype), b_v, b_o, input_precision="ieee")
    return b_o, peak, total
