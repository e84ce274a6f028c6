"""Attention to FP8 latents, which are fetched two by two.

As in ``paged_attention``, two adjacent numbers of a row travel as one int16, which is what tensor
cores are fed by. They part when they are widened, to a product each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_hybrid.ops.triton.fp8_kv import float16_factors, widen_pairs
from torch_hybrid.ops.triton.ragged import tokens_of_block
from torch_hybrid.ops.triton.softmax import advance, finish


@triton.jit
def _load_pairs(rows: tl.tensor, index: tl.tensor, mask: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Load the even and the odd elements of rows."""
    even = tl.load(rows + 2 * index, mask=mask, other=0.0)
    return even, tl.load(rows + 2 * index + 1, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def attend_pairs_kernel(
    q_latent: tl.tensor,
    q_rope: tl.tensor,
    pairs: tl.tensor,
    pool_scale: tl.tensor,
    cu_seqlens: tl.tensor,
    seq_lens: tl.tensor,
    page_table: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    scale_log2: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_q_latent_token: tl.tensor,
    stride_q_latent_head: tl.tensor,
    stride_q_rope_token: tl.tensor,
    stride_q_rope_head: tl.tensor,
    stride_page_table: tl.tensor,
    stride_table_page: tl.tensor,
    H: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    CONVERTS: tl.constexpr,
) -> None:
    """Attend from a block of tokens and heads to one split of the keys, two numbers at a time.

    Grid: blocks of BLOCK_Q tokens, blocks of BLOCK_H heads, splits. Tile: BLOCK_M rows by BLOCK_KV
    latents. Pipeline: the compiler's, of two stages. Memory: pairs of FP8 numbers, widened in
    registers; ``out`` and ``lse`` hold the splits in a row.
    """
    BLOCK_M: tl.constexpr = BLOCK_Q * BLOCK_H
    WIDTH: tl.constexpr = (RANK + ROPE) // 2
    split = tl.program_id(2) if NUM_SPLITS > 1 else 0
    row = tl.arange(0, BLOCK_M)
    head = tl.program_id(1) * BLOCK_H + row % BLOCK_H
    index = tl.arange(0, BLOCK_RANK)[None, :]
    index_rope = tl.arange(0, BLOCK_ROPE)[None, :]
    seq, _begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, tl.program_id(0), BLOCK_Q)
    if first_token >= end:
        return

    token = first_token + row // BLOCK_H
    mask_m = (head < H) & (token < end)
    mask_rank, mask_rope = index < RANK // 2, index_rope < ROPE // 2
    p_latent = q_latent + (token.to(tl.int64) * stride_q_latent_token + head * stride_q_latent_head)
    p_rope = q_rope + (token.to(tl.int64) * stride_q_rope_token + head * stride_q_rope_head)
    q_even, q_odd = _load_pairs(p_latent[:, None], index, mask_m[:, None] & mask_rank)
    r_even, r_odd = _load_pairs(p_rope[:, None], index_rope, mask_m[:, None] & mask_rope)
    scale_log2 *= tl.load(pool_scale)
    IN_FLOAT16: tl.constexpr = q_even.dtype == tl.bfloat16
    q_worth = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    if IN_FLOAT16:
        q_even, q_odd = q_even.to(tl.float32), q_odd.to(tl.float32)
        r_even, r_odd = r_even.to(tl.float32), r_odd.to(tl.float32)
        of_rank = tl.max(tl.maximum(tl.abs(q_even), tl.abs(q_odd)), 1)
        of_rope = tl.max(tl.maximum(tl.abs(r_even), tl.abs(r_odd)), 1)
        factor, q_worth = float16_factors(tl.maximum(of_rank, of_rope))
        q_even = (q_even * factor[:, None]).to(tl.float16)
        q_odd = (q_odd * factor[:, None]).to(tl.float16)
        r_even = (r_even * factor[:, None]).to(tl.float16)
        r_odd = (r_odd * factor[:, None]).to(tl.float16)

    ahead = tl.load(seq_lens + seq) - end  # of a token's number, to its position in the sequence
    keys_end = ahead + tl.minimum(first_token + BLOCK_Q, end)
    tiles_per_split = tl.cdiv(tl.cdiv(keys_end, BLOCK_KV), NUM_SPLITS)
    split_begin = split * tiles_per_split * BLOCK_KV
    split_end = tl.minimum(keys_end, split_begin + tiles_per_split * BLOCK_KV)
    peak = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    o_even = tl.zeros([BLOCK_M, BLOCK_RANK], dtype=tl.float32)
    o_odd = tl.zeros([BLOCK_M, BLOCK_RANK], dtype=tl.float32)
    table = page_table + seq.to(tl.int64) * stride_page_table
    for tile in range(tl.cdiv(split_end - split_begin, BLOCK_KV)):
        key = split_begin + tile * BLOCK_KV + tl.arange(0, BLOCK_KV)
        # Past the last key, that one again, which is hidden: no row needs a mask.
        held = tl.minimum(key, split_end - 1)
        if PAGE_SIZE % BLOCK_KV == 0:  # a tile lies in one page
            first = split_begin + tile * BLOCK_KV
            page = tl.load(table + first // PAGE_SIZE * stride_table_page)
            first_row = pairs + (page.to(tl.int64) * PAGE_SIZE + first % PAGE_SIZE) * WIDTH
            p_row = first_row + ((held - first) * WIDTH)[:, None]
        else:
            page = tl.load(table + held // PAGE_SIZE * stride_table_page)
            slot = page.to(tl.int64) * PAGE_SIZE + held % PAGE_SIZE
            p_row = pairs + slot[:, None] * WIDTH
        b_rope = tl.load(p_row + RANK // 2 + index_rope, mask=mask_rope, other=0)
        b_c = tl.load(p_row + index, mask=mask_rank | (RANK == 2 * BLOCK_RANK), other=0)
        k_even, k_odd = widen_pairs(b_rope, q_even.dtype, CONVERTS)
        c_even, c_odd = widen_pairs(b_c, q_even.dtype, CONVERTS)
        products = tl.dot(r_even, tl.trans(k_even), input_precision="ieee")
        products = tl.dot(r_odd, tl.trans(k_odd), products, input_precision="ieee")
        products = tl.dot(q_even, tl.trans(c_even), products, input_precision="ieee")
        products = tl.dot(q_odd, tl.trans(c_odd), products, input_precision="ieee")
        if IN_FLOAT16:
            products *= q_worth[:, None]
        visible = (key[None, :] <= (ahead + token)[:, None]) & (key < split_end)[None, :]
        products = tl.where(visible, products, -float("inf"))
        weights, rescale, peak, total = advance(products, scale_log2, peak, total)
        weights = weights.to(q_even.dtype)
        o_even = tl.dot(weights, c_even, o_even * rescale[:, None], input_precision="ieee")
        o_odd = tl.dot(weights, c_odd, o_odd * rescale[:, None], input_precision="ieee")

    total, b_lse = finish(peak, total)
    row_out = (tl.cast(split, tl.int64) * num_tokens + token) * H + head
    tl.store(lse + row_out, b_lse, mask=mask_m)
    mask_out = mask_m[:, None] & mask_rank & (split_begin < split_end)
    p_out = out + row_out[:, None] * RANK + 2 * index
    worth = (tl.load(pool_scale) / total)[:, None]
    tl.store(p_out, (o_even * worth).to(out.dtype.element_ty), mask=mask_out)
    tl.store(p_out + 1, (o_odd * worth).to(out.dtype.element_ty), mask=mask_out)
