"""Implementation "triton": heads are the rows of a tile, since all read the same latents."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.latent_attention._triton_hopper import BLOCK_M, HOPPER_OPTIONS, serves
from torch_hybrid.ops.latent_attention._triton_store import store_rows
from torch_hybrid.ops.latent_attention._triton_tiles import Tiles
from torch_hybrid.ops.latent_attention.op import LatentAttention
from torch_hybrid.ops.triton.devices import converts_fp8, multiplies_float32
from torch_hybrid.ops.triton.fp8 import readable
from torch_hybrid.ops.triton.fp8_kv import float16_factors, widen_pairs
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.padding import set_padding
from torch_hybrid.ops.triton.ragged import num_blocks, tokens_of_block
from torch_hybrid.ops.triton.softmax import advance, finish, log2_scale, merge_splits

Form = tuple[Any, dict[str, Any]]  # a kernel, and what it alone takes


def latent_attention(x: LatentAttention, *, is_invariant: bool = False) -> Tensor:
    """Launch ``torch_hybrid::latent_attention``.

    Args:
        x: arguments of the op.
        is_invariant: whether a token has the bits that it has in any call.
    """
    q_latent = x.q_latent
    out = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    lse = q_latent.new_empty(q_latent.shape[:2], dtype=torch.float32)
    if x.page_table.shape[0] == 0:
        return out.zero_()
    store_rows(x, x.pool if x.pool_scale is None else readable(x.pool))
    for_hopper = serves(x)
    tiles = Tiles.of(x, for_hopper=for_hopper, is_invariant=is_invariant)
    form = _form(x, tiles, for_hopper=for_hopper)
    if tiles.num_splits == 1:
        _attend(x, out, lse, tiles, form)
        return out
    partial_out = out.new_empty(tiles.num_splits, *out.shape, dtype=torch.float32)
    partial_lse = lse.new_empty(tiles.num_splits, *lse.shape)
    _attend(x, partial_out, partial_lse, tiles, form)
    merge_splits(partial_out, partial_lse, x.cu_seqlens, out, lse)
    return out


def _attend(x: LatentAttention, out: Tensor, lse: Tensor, tiles: Tiles, form: Form) -> None:
    """Attend within each split of the keys; ``out`` and ``lse`` hold the splits in a row.

    Padding is filled where there is one split, and else left to the merge.
    """
    kernel, options = form
    num_tokens, num_heads, _ = x.q_latent.shape
    num_seqs = x.page_table.shape[0]
    if tiles.num_splits == 1 and (kernel is not _attend_kernel or x.pool_scale is not None):
        set_padding(out, lse, x.cu_seqlens)
    grid = (
        num_blocks(num_tokens, num_seqs, tiles.block_q),
        triton.cdiv(num_heads, tiles.block_h),
        tiles.num_splits,
    )
    bind(kernel, x, tiles)[grid](
        out=out,
        lse=lse,
        scale_log2=log2_scale(x.scale),
        stride_table_page=x.page_table.stride(1),
        ROPE=x.q_rope.shape[2],
        **options,
    )


def _form(x: LatentAttention, tiles: Tiles, *, for_hopper: bool) -> Form:
    """Choose a kernel, and what it takes beside arguments, sizes and tiles."""
    if for_hopper and tiles.block_m == BLOCK_M:
        from torch_hybrid.ops.latent_attention._triton_hopper_kernel import hopper_attend_kernel

        return hopper_attend_kernel, HOPPER_OPTIONS
    options: dict[str, Any] = {
        "FLOAT32_PRODUCTS": multiplies_float32(x.pool),
        "CONVERTS": converts_fp8(x.pool.device),
        "num_warps": tiles.num_warps,
        "num_stages": 2,
        "enable_fp_fusion": True,
    }
    if x.pool_scale is not None:
        options |= {
            "pool": x.pool.view(torch.int16),
            "BLOCK_PART": max(16, tiles.block_rank // 2),
            "BLOCK_ROPE": max(16, tiles.block_rope // 2),
        }
    return _attend_kernel, options


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _attend_kernel(
    q_latent: tl.tensor,
    q_rope: tl.tensor,
    pool: tl.tensor,
    pool_scale: tl.tensor | None,
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
    BLOCK_PART: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    FLOAT32_PRODUCTS: tl.constexpr,
    CONVERTS: tl.constexpr,
) -> None:
    """Attend from a block of tokens and heads to one split of the keys.

    Grid: blocks of BLOCK_Q tokens, blocks of BLOCK_H heads, splits. Tile: BLOCK_M rows by BLOCK_KV
    latents, which are taken in parts of BLOCK_PART elements. Pipeline: the compiler's, of two
    stages. Memory: ``out`` and ``lse`` hold the splits in a row.

    With ``pool_scale`` the pool is of pairs, as in ``paged_attention``: two adjacent FP8 numbers of
    a row travel as one int16, and part when they are widened. Even elements are one part, odd ones
    the other.
    """
    IN_PAIRS: tl.constexpr = pool_scale is not None
    IN_FLOAT16: tl.constexpr = IN_PAIRS and q_latent.dtype.element_ty == tl.bfloat16
    BLOCK_M: tl.constexpr = BLOCK_Q * BLOCK_H
    PARTS: tl.constexpr = 2 if IN_PAIRS else BLOCK_RANK // BLOCK_PART
    AT_ONCE: tl.constexpr = 2 if IN_PAIRS else 1  # numbers of a row that are fetched as one
    WIDTH: tl.constexpr = (RANK + ROPE) // AT_ONCE
    split = tl.program_id(2) if NUM_SPLITS > 1 else 0
    row = tl.arange(0, BLOCK_M)
    head = tl.program_id(1) * BLOCK_H + row % BLOCK_H
    index_part = tl.arange(0, BLOCK_PART)[None, :]
    index_rope = tl.arange(0, BLOCK_ROPE)
    if IN_PAIRS:
        mask_rope = (index_rope < ROPE // 2)[None, :]
    else:
        mask_rope = ((index_rope < ROPE) | (ROPE == BLOCK_ROPE))[None, :]
    nothing = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)

    # The grid has a block for any BLOCK_Q tokens in a row: their padding is filled here, or where
    # splits are merged; beside pairs, by a launch of its own.
    if NUM_SPLITS == 1 and not IN_PAIRS:
        place = tl.program_id(0) * BLOCK_Q + row // BLOCK_H
        is_padding = (head < H) & (place >= tl.load(cu_seqlens + num_seqs)) & (place < num_tokens)
        row_padding = place.to(tl.int64) * H + head
        zeros = tl.zeros([BLOCK_M, BLOCK_PART], dtype=out.dtype.element_ty)
        for part in tl.static_range(PARTS):
            index = part * BLOCK_PART + index_part
            p_padding = out + row_padding[:, None] * RANK + index
            tl.store(p_padding, zeros, mask=is_padding[:, None] & (index < RANK))
        tl.store(lse + row_padding, nothing, mask=is_padding)

    seq, _begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, tl.program_id(0), BLOCK_Q)
    if first_token >= end:
        return
    token = first_token + row // BLOCK_H
    mask_m = (head < H) & (token < end)
    is_query = mask_m[:, None]
    p_latent = q_latent + (token.to(tl.int64) * stride_q_latent_token + head * stride_q_latent_head)
    p_rope = q_rope + (token.to(tl.int64) * stride_q_rope_token + head * stride_q_rope_head)
    if IN_PAIRS:
        b_q = _pair_of(p_latent[:, None], index_part, is_query & (index_part < RANK // 2))
        b_q_rope = _pair_of(p_rope[:, None], index_rope[None, :], is_query & mask_rope)
        scale_log2 *= tl.load(pool_scale)
        if IN_FLOAT16:
            b_q, b_q_rope, q_worth = _in_float16(b_q, b_q_rope)
    else:
        p_rope = p_rope[:, None] + index_rope[None, :]
        b_q_part = tl.load(p_rope, mask=is_query & mask_rope, other=0.0)
        b_q_rope = (b_q_part.to(tl.float32) if FLOAT32_PRODUCTS else b_q_part,)
        b_q, b_o = (), ()
        for part in tl.static_range(PARTS):
            index = part * BLOCK_PART + index_part
            b_q_part = tl.load(p_latent[:, None] + index, mask=is_query & (index < RANK), other=0.0)
            if FLOAT32_PRODUCTS:
                b_q_part = b_q_part.to(tl.float32)
            b_q = b_q + (b_q_part,)  # type: ignore[assignment]  # noqa: RUF005  (Triton has no unpacking)
            b_o = b_o + (tl.zeros([BLOCK_M, BLOCK_PART], dtype=tl.float32),)  # type: ignore[assignment]  # noqa: RUF005

    ahead = tl.load(seq_lens + seq) - end  # of a token's number, to its position in the sequence
    keys_end = ahead + tl.minimum(first_token + BLOCK_Q, end)
    tiles_per_split = tl.cdiv(tl.cdiv(keys_end, BLOCK_KV), NUM_SPLITS)
    split_begin = split * tiles_per_split * BLOCK_KV
    split_end = tl.minimum(keys_end, split_begin + tiles_per_split * BLOCK_KV)
    peak = nothing
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if IN_PAIRS:  # here: before the others they would have registers that were not measured
        zeros = tl.zeros([BLOCK_M, BLOCK_PART], dtype=tl.float32)
        b_o = (zeros, zeros)  # type: ignore[assignment]
    table = page_table + seq.to(tl.int64) * stride_page_table
    for tile in range(tl.cdiv(split_end - split_begin, BLOCK_KV)):
        key = split_begin + tile * BLOCK_KV + tl.arange(0, BLOCK_KV)
        # Past the last key, that one again, which is hidden: no row needs a mask.
        held = tl.minimum(key, split_end - 1)
        if PAGE_SIZE % BLOCK_KV == 0:  # a tile lies in one page
            first = split_begin + tile * BLOCK_KV
            page = tl.load(table + first // PAGE_SIZE * stride_table_page)
            first_row = pool + (page.to(tl.int64) * PAGE_SIZE + first % PAGE_SIZE) * WIDTH
            p_row = first_row + ((held - first) * WIDTH)[:, None]
        else:
            page = tl.load(table + held // PAGE_SIZE * stride_table_page)
            slot = page.to(tl.int64) * PAGE_SIZE + held % PAGE_SIZE
            p_row = pool + slot[:, None] * WIDTH
        b_rope = tl.load(p_row + RANK // AT_ONCE + index_rope[None, :], mask=mask_rope, other=0)
        if IN_PAIRS:
            mask_part = (index_part < RANK // 2) | (RANK == 2 * BLOCK_PART)
            b_pairs = tl.load(p_row + index_part, mask=mask_part, other=0)
            b_k_rope = widen_pairs(b_rope, b_q[0].dtype, CONVERTS)
            b_wide = widen_pairs(b_pairs, b_q[0].dtype, CONVERTS)
        else:
            b_k_rope = (b_rope.to(tl.float32) if FLOAT32_PRODUCTS else b_rope,)
        products = tl.dot(b_q_rope[0], tl.trans(b_k_rope[0]), input_precision="ieee")
        if IN_PAIRS:
            products = tl.dot(b_q_rope[1], tl.trans(b_k_rope[1]), products, input_precision="ieee")
        b_c = ()
        for part in tl.static_range(PARTS):
            if IN_PAIRS:
                b_c_part = b_wide[part]
            else:
                index = part * BLOCK_PART + index_part
                mask_part = (index < RANK) | (RANK == BLOCK_RANK)
                b_c_part = tl.load(p_row + index, mask=mask_part, other=0.0)
                if FLOAT32_PRODUCTS:
                    b_c_part = b_c_part.to(tl.float32)
            b_c = b_c + (b_c_part,)  # type: ignore[assignment]  # noqa: RUF005
            if b_c_part.dtype == tl.float32 and not IN_PAIRS:
                # Added by +, a product goes on from the sum before it: the longer a sum, the more
                # it loses.
                of_part = tl.dot(b_q[part], tl.trans(b_c_part), input_precision="ieee")
                products = tl.fma(products, 1.0, of_part)
            else:
                products = tl.dot(b_q[part], tl.trans(b_c_part), products, input_precision="ieee")
        if IN_FLOAT16:
            products *= q_worth[:, None]
        visible = (key[None, :] <= (ahead + token)[:, None]) & (key < split_end)[None, :]
        products = tl.where(visible, products, -float("inf"))
        weights, rescale, peak, total = advance(products, scale_log2, peak, total)
        weights = weights.to(b_k_rope[0].dtype)
        b_sum = ()
        for part in tl.static_range(PARTS):
            b_part = tl.dot(
                weights, b_c[part], b_o[part] * rescale[:, None], input_precision="ieee"
            )
            b_sum = b_sum + (b_part,)  # type: ignore[assignment]  # noqa: RUF005
        b_o = b_sum

    total, b_lse = finish(peak, total)
    row_out = (tl.cast(split, tl.int64) * num_tokens + token) * H + head
    tl.store(lse + row_out, b_lse, mask=mask_m)
    if IN_PAIRS:
        mask_out = is_query & (index_part < RANK // 2) & (split_begin < split_end)
        p_out = out + row_out[:, None] * RANK + 2 * index_part
        worth = (tl.load(pool_scale) / total)[:, None]
        for part in tl.static_range(PARTS):
            tl.store(p_out + part, (b_o[part] * worth).to(out.dtype.element_ty), mask=mask_out)
    else:
        has_keys = is_query & (split_begin < split_end)
        for part in tl.static_range(PARTS):
            index = part * BLOCK_PART + index_part
            b_part = (b_o[part] / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + row_out[:, None] * RANK + index, b_part, mask=has_keys & (index < RANK))


@triton.jit
def _pair_of(rows: tl.tensor, index: tl.tensor, mask: tl.tensor) -> tl.tuple:
    """Load the even and the odd elements of rows."""
    even = tl.load(rows + 2 * index, mask=mask, other=0.0)
    return even, tl.load(rows + 2 * index + 1, mask=mask, other=0.0)


@triton.jit
def _in_float16(b_q: tl.tuple, b_rope: tl.tuple) -> tl.tuple:
    """Scale rows of queries to where float16 holds them; return what products with a row are worth
    too."""
    q_even, q_odd = b_q[0].to(tl.float32), b_q[1].to(tl.float32)
    r_even, r_odd = b_rope[0].to(tl.float32), b_rope[1].to(tl.float32)
    of_rank = tl.max(tl.maximum(tl.abs(q_even), tl.abs(q_odd)), 1)
    of_rope = tl.max(tl.maximum(tl.abs(r_even), tl.abs(r_odd)), 1)
    factor, worth = float16_factors(tl.maximum(of_rank, of_rope))
    q_even = (q_even * factor[:, None]).to(tl.float16)
    q_odd = (q_odd * factor[:, None]).to(tl.float16)
    r_even = (r_even * factor[:, None]).to(tl.float16)
    r_odd = (r_odd * factor[:, None]).to(tl.float16)
    return (q_even, q_odd), (r_even, r_odd), worth
