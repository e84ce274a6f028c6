# mypy: disable-error-code="untyped-decorator"
"""Short queries to keys and values of 8 bits, which are fetched two by two.

Tensor cores take 16 bits, and what brings a tile from shared memory to them moves numbers of 16
bits: one of 8 would go byte by byte where it has to be transposed, as values have. So two adjacent
numbers of a row travel as one of 16 bits, and part when they are widened: the even dims make one
product, the odd dims another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.paged_attention._triton_tiles import Tiles
from torch_hybrid.ops.triton.devices import converts_fp8
from torch_hybrid.ops.triton.fp8_kv import float16_factors, widen_pairs
from torch_hybrid.ops.triton.ragged import first_token_of_block, sequence_of_block
from torch_hybrid.ops.triton.relative_bias import (
    biases_of_rows,
    reach_of,
    with_biases,
)
from torch_hybrid.ops.triton.softmax import advance, finish, log2_scale, tanh


def attend_to_pairs(
    q: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int,
    softcap: float,
    relative_bias: Tensor | None,
    tiles: Tiles,
    *,
    kv_scales: Tensor,
) -> None:
    """Attend within each split of the keys; ``out`` and ``lse`` hold the splits in a row."""
    num_tokens, num_q_heads, head_dim = q.shape
    pairs = kv.view(torch.int16)
    _, _, page_size, num_kv_heads, _ = kv.shape
    _attend_pairs_kernel[(tiles.num_blocks, num_kv_heads, tiles.num_splits)](
        q,
        pairs,
        kv_scales,
        cu_seqlens,
        seq_lens,
        page_table,
        relative_bias,
        out,
        lse,
        log2_scale(softcap or scale),
        scale / softcap if softcap else 1.0,
        window,
        num_tokens,
        page_table.shape[0],
        q.stride(0),
        q.stride(1),
        pairs.stride(0),
        page_table.stride(0),
        page_table.stride(1),
        HQ=num_q_heads,
        HKV=num_kv_heads,
        D=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_Q=tiles.block_q,
        BLOCK_M=tiles.block_m,
        BLOCK_PAIRS=max(16, tiles.block_d // 2),
        BLOCK_KV=tiles.block_kv,
        NUM_SPLITS=tiles.num_splits,
        HAS_WINDOW=window > 0,
        HAS_SOFTCAP=softcap > 0,
        ALIGNED=tiles.are_aligned,
        REACH=reach_of(relative_bias),
        CONVERTS=converts_fp8(q.device),
        num_warps=tiles.num_warps,
        num_stages=3,  # page numbers are fetched two tiles ahead, keys and values one
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "window"])
def _attend_pairs_kernel(
    q: tl.tensor,
    pairs: tl.tensor,
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
    stride_values: tl.tensor,
    stride_table_seq: tl.tensor,
    stride_table_page: tl.tensor,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ALIGNED: tl.constexpr,
    REACH: tl.constexpr,
    CONVERTS: tl.constexpr,
) -> None:
    """One program: a block of tokens, the query heads of one key head, one split of the keys."""
    GROUP: tl.constexpr = HQ // HKV
    head_kv = tl.program_id(1)
    split = tl.program_id(2)
    seq = sequence_of_block(cu_seqlens, num_seqs, tl.program_id(0), BLOCK_Q)
    begin = tl.load(cu_seqlens + seq)
    end = tl.load(cu_seqlens + seq + 1)
    first_token = first_token_of_block(begin, seq, tl.program_id(0), BLOCK_Q)
    if first_token >= end:
        return

    row = tl.arange(0, BLOCK_M)
    index = tl.arange(0, BLOCK_PAIRS)
    token = first_token + row // GROUP
    head = head_kv * GROUP + row % GROUP
    mask_m = (row < BLOCK_Q * GROUP) & (token < end)
    mask_d = index < D // 2
    mask_q = mask_m[:, None] & mask_d[None, :]
    offset_q = token.to(tl.int64) * stride_q_token + head * stride_q_head
    p_q = q + offset_q[:, None] + 2 * index[None, :]
    q_even = tl.load(p_q, mask=mask_q, other=0.0)
    q_odd = tl.load(p_q + 1, mask=mask_q, other=0.0)
    if HAS_SOFTCAP:
        cap_scale *= tl.load(kv_scales + head_kv)
    else:
        scale_log2 *= tl.load(kv_scales + head_kv)
    IN_FLOAT16: tl.constexpr = q_even.dtype == tl.bfloat16
    q_worth = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    if IN_FLOAT16:
        q_even, q_odd = q_even.to(tl.float32), q_odd.to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(q_even), tl.abs(q_odd)), 1)
        factor, q_worth = float16_factors(largest)
        q_even = (q_even * factor[:, None]).to(tl.float16)
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

    peak = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    o_even = tl.zeros([BLOCK_M, BLOCK_PAIRS], dtype=tl.float32)
    o_odd = tl.zeros([BLOCK_M, BLOCK_PAIRS], dtype=tl.float32)
    table = page_table + seq.to(tl.int64) * stride_table_seq
    heads = pairs + head_kv * (D // 2) + index
    for tile in range(tl.cdiv(split_end - split_begin, BLOCK_KV)):
        key = split_begin + tile * BLOCK_KV + tl.arange(0, BLOCK_KV)
        mask_key = key < split_end
        if HAS_WINDOW and ALIGNED:
            mask_key &= key >= first_key
        page = tl.load(table + key // PAGE_SIZE * stride_table_page, mask=mask_key, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
        p_k = heads[None, :] + slot[:, None] * (HKV * (D // 2))
        mask_kv = mask_key[:, None] & mask_d[None, :]
        b_k = tl.load(p_k, mask=mask_kv, other=0)
        b_v = tl.load(p_k + stride_values, mask=mask_kv, other=0)
        k_even, k_odd = widen_pairs(b_k, q_even.dtype, CONVERTS)
        products = tl.dot(q_even, tl.trans(k_even), out_dtype=tl.float32, input_precision="ieee")
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
        weights = weights.to(q_even.dtype)
        v_even, v_odd = widen_pairs(b_v, q_even.dtype, CONVERTS)
        o_even = tl.dot(weights, v_even, o_even * rescale[:, None], input_precision="ieee")
        o_odd = tl.dot(weights, v_odd, o_odd * rescale[:, None], input_precision="ieee")

    total, b_lse = finish(peak, total)
    row_out = (split.to(tl.int64) * num_tokens + token) * HQ + head
    tl.store(lse + row_out, b_lse, mask=mask_m)
    value_scale = tl.load(kv_scales + HKV + head_kv)
    mask_out = mask_q & (split_begin < split_end)
    p_out = out + row_out[:, None] * D + 2 * index[None, :]
    o_even = (o_even * value_scale / total[:, None]).to(out.dtype.element_ty)
    o_odd = (o_odd * value_scale / total[:, None]).to(out.dtype.element_ty)
    tl.store(p_out, o_even, mask=mask_out)
    tl.store(p_out + 1, o_odd, mask=mask_out)
