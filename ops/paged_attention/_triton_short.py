"""Short queries, and float32 ones: programs share the keys of a sequence in splits.

FP8 keys and values are fetched two by two. Tensor cores take 16-bit numbers, and what brings a tile
from shared memory to them moves such: FP8 would go byte by byte where it has to be transposed, as
values have. So two adjacent numbers of a row travel as one 16-bit number, and part when they are
widened: the even dims make one product, the odd dims another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.paged_attention._triton_tiles import Tiles
from torch_hybrid.ops.paged_attention.op import Pages
from torch_hybrid.ops.triton.devices import converts_fp8, multiplies_float32
from torch_hybrid.ops.triton.early import follow
from torch_hybrid.ops.triton.fp8_kv import float16_factors, widen_pairs
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.ragged import tokens_of_block
from torch_hybrid.ops.triton.relative_bias import (
    biases_of_rows,
    reach_of,
    with_biases,
)
from torch_hybrid.ops.triton.softmax import advance, finish, log2_scale, merge_splits, tanh


def attend_short(x: Pages, kv: Tensor, out: Tensor, lse: Tensor, *, is_invariant: bool) -> None:
    """Attend to ``kv``, which has the new rows.

    Args:
        x: arguments of the op.
        kv: ``x.kv`` in a dtype that kernels read.
        out, lse: results, [T, Hq, D] and [T, Hq]. **Mutated**.
        is_invariant: whether tiles do not depend on the batch.
    """
    tiles = Tiles.of(x, is_invariant=is_invariant)
    if tiles.num_splits == 1:
        _attend(x, kv, out, lse, tiles)
        return
    partial_out = out.new_empty(tiles.num_splits, *out.shape, dtype=torch.float32)
    partial_lse = lse.new_empty(tiles.num_splits, *lse.shape)
    _attend(x, kv, partial_out, partial_lse, tiles)
    merge_splits(partial_out, partial_lse, x.cu_seqlens, out, lse)


def _attend(x: Pages, kv: Tensor, out: Tensor, lse: Tensor, tiles: Tiles) -> None:
    """Attend within each split of the keys; ``out`` and ``lse`` hold the splits in a row."""
    q, num_kv_heads = x.q, kv.shape[3]
    rows = kv if x.kv_scales is None else kv.view(torch.int16)
    bind(_attend_kernel, x, tiles)[(tiles.num_blocks, num_kv_heads, tiles.num_splits)](
        kv=rows,
        out=out,
        lse=lse,
        scale_log2=log2_scale(x.softcap or x.scale),
        cap_scale=x.scale / x.softcap if x.softcap else 1.0,
        stride_table_page=x.page_table.stride(1),
        HAS_WINDOW=x.window > 0,
        HAS_SOFTCAP=x.softcap > 0,
        ALIGNED=tiles.are_aligned,
        REACH=reach_of(x.relative_bias),
        FLOAT32_PRODUCTS=multiplies_float32(q),
        CONVERTS=converts_fp8(q.device),
        num_warps=tiles.num_warps,
        num_stages=3,  # page numbers are fetched two tiles ahead, keys and values one
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "window"])
def _attend_kernel(
    q: tl.tensor,
    kv: tl.tensor,
    kv_scales: tl.tensor,
    cu_seqlens: tl.tensor,
    seq_lens: tl.tensor,
    page_table: tl.tensor,
    relative_bias: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    scale_log2: tl.tensor,
    cap_scale: tl.tensor,
    window: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_kv: tl.tensor,
    stride_page_table: tl.tensor,
    stride_table_page: tl.tensor,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ALIGNED: tl.constexpr,
    REACH: tl.constexpr,
    FLOAT32_PRODUCTS: tl.constexpr,
    CONVERTS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Attend from a block of tokens, in the query heads of one key head, to one split of the keys.

    Grid: blocks of tokens, key heads, splits. With ``kv_scales`` the pool is of pairs.
    """
    follow(EARLY)
    GROUP: tl.constexpr = HQ // HKV
    IN_PAIRS: tl.constexpr = kv_scales is not None
    WIDTH: tl.constexpr = D // 2 if IN_PAIRS else D  # what is fetched of a row
    head_kv = tl.program_id(1)
    split = tl.program_id(2)
    seq, _begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, tl.program_id(0), BLOCK_Q)
    if first_token >= end:
        return

    row = tl.arange(0, BLOCK_M)
    index = tl.arange(0, BLOCK_ROW)
    token = first_token + row // GROUP
    head = head_kv * GROUP + row % GROUP
    mask_m = (row < BLOCK_Q * GROUP) & (token < end)
    mask_d = index < WIDTH
    mask_q = mask_m[:, None] & mask_d[None, :]
    offset_q = token.to(tl.int64) * stride_q_token + head * stride_q_head
    if IN_PAIRS:
        p_q = q + offset_q[:, None] + 2 * index[None, :]
        b_q = tl.load(p_q, mask=mask_q, other=0.0)
        q_odd = tl.load(p_q + 1, mask=mask_q, other=0.0)
        if HAS_SOFTCAP:
            cap_scale *= tl.load(kv_scales + head_kv)
        else:
            scale_log2 *= tl.load(kv_scales + head_kv)
    else:
        b_q = tl.load(q + offset_q[:, None] + index[None, :], mask=mask_q, other=0.0)
        if FLOAT32_PRODUCTS:
            b_q = b_q.to(tl.float32)
    IN_FLOAT16: tl.constexpr = IN_PAIRS and b_q.dtype == tl.bfloat16
    if IN_FLOAT16:
        b_q, q_odd = b_q.to(tl.float32), q_odd.to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(b_q), tl.abs(q_odd)), 1)
        factor, q_worth = float16_factors(largest)
        b_q = (b_q * factor[:, None]).to(tl.float16)
        q_odd = (q_odd * factor[:, None]).to(tl.float16)

    # Positions in the sequence: of each row's own token, and the keys that the block can see.
    ahead = tl.load(seq_lens + seq) - end
    position = ahead + token
    keys_begin = 0
    if HAS_WINDOW:
        keys_begin = tl.maximum(0, ahead + first_token - window + 1)
    first_key = keys_begin
    if ALIGNED:
        keys_begin = keys_begin // BLOCK_KV * BLOCK_KV
    keys_end = ahead + tl.minimum(first_token + BLOCK_Q, end)
    tiles_per_split = tl.cdiv(tl.cdiv(keys_end - keys_begin, BLOCK_KV), NUM_SPLITS)
    split_begin = keys_begin + split * tiles_per_split * BLOCK_KV
    split_end = tl.minimum(keys_end, split_begin + tiles_per_split * BLOCK_KV)

    unit = scale_log2 if relative_bias is None else 1.0  # logits to base 2 of what is summed
    if relative_bias is not None:
        biases = biases_of_rows(relative_bias, first_token, row, mask_m, head_kv, HQ, GROUP, REACH)

    # Running maximum of each row's logits, in log2 units, and sum of their exponentials.
    peak = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    b_o = tl.zeros([BLOCK_M, BLOCK_ROW], dtype=tl.float32)  # of the even dims, where in pairs
    if IN_PAIRS:
        o_odd = tl.zeros([BLOCK_M, BLOCK_ROW], dtype=tl.float32)
    table = page_table + seq.to(tl.int64) * stride_page_table
    heads = kv + head_kv * WIDTH + index
    # Tiles are counted from 0: with another lower bound the compiler loses sight of the
    # alignment of what is loaded, and loads element by element.
    for tile in range(tl.cdiv(split_end - split_begin, BLOCK_KV)):
        key = split_begin + tile * BLOCK_KV + tl.arange(0, BLOCK_KV)
        mask_key = key < split_end
        if HAS_WINDOW and ALIGNED:
            mask_key &= key >= first_key
        page = tl.load(table + key // PAGE_SIZE * stride_table_page, mask=mask_key, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
        p_k = heads[None, :] + slot[:, None] * (HKV * WIDTH)
        mask_kv = mask_key[:, None] & mask_d[None, :]
        b_k = tl.load(p_k, mask=mask_kv, other=0)
        b_v = tl.load(p_k + stride_kv, mask=mask_kv, other=0)
        if IN_PAIRS:
            b_k, k_odd = widen_pairs(b_k, b_q.dtype, CONVERTS)
        elif FLOAT32_PRODUCTS:
            b_k = b_k.to(tl.float32)
            b_v = b_v.to(tl.float32)

        products = tl.dot(b_q, tl.trans(b_k), out_dtype=tl.float32, input_precision="ieee")
        if IN_PAIRS:
            products = tl.dot(q_odd, tl.trans(k_odd), products, input_precision="ieee")
            if IN_FLOAT16:
                products *= q_worth[:, None]
        if HAS_SOFTCAP:
            products = tanh(products * cap_scale)
        if relative_bias is not None:
            products = with_biases(products, scale_log2, biases, position, key, REACH)
        visible = key[None, :] <= position[:, None]
        if HAS_WINDOW:
            visible &= key[None, :] > position[:, None] - window
        products = tl.where(visible, products, -float("inf"))
        weights, rescale, peak, total = advance(products, unit, peak, total)
        if IN_PAIRS:
            weights = weights.to(b_q.dtype)
            b_v, v_odd = widen_pairs(b_v, b_q.dtype, CONVERTS)
            b_o = tl.dot(weights, b_v, b_o * rescale[:, None], input_precision="ieee")
            o_odd = tl.dot(weights, v_odd, o_odd * rescale[:, None], input_precision="ieee")
        else:
            b_o *= rescale[:, None]
            b_o = tl.dot(weights.to(b_v.dtype), b_v, b_o, input_precision="ieee")

    total, b_lse = finish(peak, total)
    row_out = (split.to(tl.int64) * num_tokens + token) * HQ + head
    tl.store(lse + row_out, b_lse, mask=mask_m)
    if IN_PAIRS:
        value_scale = tl.load(kv_scales + HKV + head_kv)
        mask_out = mask_q & (split_begin < split_end)
        p_out = out + row_out[:, None] * D + 2 * index[None, :]
        b_o = (b_o * value_scale / total[:, None]).to(out.dtype.element_ty)
        o_odd = (o_odd * value_scale / total[:, None]).to(out.dtype.element_ty)
        tl.store(p_out, b_o, mask=mask_out)
        tl.store(p_out + 1, o_odd, mask=mask_out)
    else:
        p_out = out + row_out[:, None] * D + index[None, :]
        b_o = (b_o / total[:, None]).to(out.dtype.element_ty)
        tl.store(p_out, b_o, mask=mask_q & (split_begin < split_end))
