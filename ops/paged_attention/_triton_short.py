# mypy: disable-error-code="untyped-decorator"
"""Short queries, and float32 ones: programs share the keys of a sequence in splits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.paged_attention._triton_pairs import attend_to_pairs
from torch_hybrid.ops.paged_attention._triton_tiles import Tiles
from torch_hybrid.ops.triton.devices import interpreted, is_hopper
from torch_hybrid.ops.triton.ragged import first_token_of_block, sequence_of_block
from torch_hybrid.ops.triton.relative_bias import (
    biases_of_rows,
    reach_of,
    with_biases,
)
from torch_hybrid.ops.triton.softmax import advance, finish, log2_scale, merge_splits, tanh


def attend_short(
    q: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
    kv_scales: Tensor | None = None,
    is_invariant: bool = False,
    relative_bias: Tensor | None = None,
) -> None:
    """Attend to ``kv``, which has the new rows; write ``out`` and ``lse``.

    ``is_invariant``: in tiles that do not depend on the batch.
    """
    _, _, page_size, num_kv_heads, head_dim = kv.shape
    num_tokens, num_q_heads, _ = q.shape
    num_seqs, max_pages = page_table.shape
    tiles = Tiles.of(
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_kv_heads=num_kv_heads,
        group=num_q_heads // num_kv_heads,
        head_dim=head_dim,
        itemsize=q.itemsize,
        max_keys=max_pages * page_size,
        in_pairs=kv_scales is not None,
        hopper=is_hopper(kv.device),
        is_invariant=is_invariant,
    )
    queries_and_keys = (q, kv, cu_seqlens, seq_lens, page_table)
    attend: Callable[..., None] = _attend
    if kv_scales is not None:
        attend = partial(attend_to_pairs, kv_scales=kv_scales)
    if tiles.num_splits == 1:
        attend(*queries_and_keys, out, lse, scale, window, softcap, relative_bias, tiles)
        return
    partial_out = out.new_empty(tiles.num_splits, *out.shape, dtype=torch.float32)
    partial_lse = lse.new_empty(tiles.num_splits, *lse.shape)
    splits = (partial_out, partial_lse)
    attend(*queries_and_keys, *splits, scale, window, softcap, relative_bias, tiles)
    merge_splits(partial_out, partial_lse, cu_seqlens, out, lse)


def _attend(
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
) -> None:
    """Attend within each split of the keys; ``out`` and ``lse`` hold the splits in a row."""
    num_tokens, num_q_heads, head_dim = q.shape
    _, _, page_size, num_kv_heads, _ = kv.shape
    _attend_kernel[(tiles.num_blocks, num_kv_heads, tiles.num_splits)](
        q,
        kv,
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
        kv.stride(0),
        page_table.stride(0),
        page_table.stride(1),
        HQ=num_q_heads,
        HKV=num_kv_heads,
        D=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_Q=tiles.block_q,
        BLOCK_M=tiles.block_m,
        BLOCK_D=tiles.block_d,
        BLOCK_KV=tiles.block_kv,
        NUM_SPLITS=tiles.num_splits,
        HAS_WINDOW=window > 0,
        HAS_SOFTCAP=softcap > 0,
        ALIGNED=tiles.are_aligned,
        REACH=reach_of(relative_bias),
        # The interpreter holds bfloat16 as integers and multiplies them as such.
        FLOAT32_PRODUCTS=interpreted() and q.dtype == torch.bfloat16,
        num_warps=tiles.num_warps,
        num_stages=3,  # page numbers are fetched two tiles ahead, keys and values one
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "window"])
def _attend_kernel(
    q: tl.tensor,
    kv: tl.tensor,
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
    BLOCK_D: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ALIGNED: tl.constexpr,
    REACH: tl.constexpr,
    FLOAT32_PRODUCTS: tl.constexpr,
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
    index_d = tl.arange(0, BLOCK_D)
    token = first_token + row // GROUP
    head = head_kv * GROUP + row % GROUP
    mask_m = (row < BLOCK_Q * GROUP) & (token < end)
    mask_d = index_d < D
    mask_q = mask_m[:, None] & mask_d[None, :]
    offset_q = token.to(tl.int64) * stride_q_token + head * stride_q_head
    b_q = tl.load(q + offset_q[:, None] + index_d[None, :], mask=mask_q, other=0.0)
    if FLOAT32_PRODUCTS:
        b_q = b_q.to(tl.float32)

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
    b_o = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    table = page_table + seq.to(tl.int64) * stride_table_seq
    heads = kv + head_kv * D + index_d
    # Tiles are counted from 0: with another lower bound the compiler loses sight of the
    # alignment of what is loaded, and loads element by element.
    for tile in range(tl.cdiv(split_end - split_begin, BLOCK_KV)):
        key = split_begin + tile * BLOCK_KV + tl.arange(0, BLOCK_KV)
        mask_key = key < split_end
        if HAS_WINDOW and ALIGNED:
            mask_key &= key >= first_key
        page = tl.load(table + key // PAGE_SIZE * stride_table_page, mask=mask_key, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
        p_k = heads[None, :] + slot[:, None] * (HKV * D)
        mask_kv = mask_key[:, None] & mask_d[None, :]
        b_k = tl.load(p_k, mask=mask_kv, other=0.0)
        b_v = tl.load(p_k + stride_values, mask=mask_kv, other=0.0)
        if FLOAT32_PRODUCTS:
            b_k = b_k.to(tl.float32)
            b_v = b_v.to(tl.float32)

        products = tl.dot(b_q, tl.trans(b_k), out_dtype=tl.float32, input_precision="ieee")
        if HAS_SOFTCAP:
            products = tanh(products * cap_scale)
        if relative_bias is not None:
            products = with_biases(products, scale_log2, biases, position, key, REACH)
        visible = key[None, :] <= position[:, None]
        if HAS_WINDOW:
            visible &= key[None, :] > position[:, None] - window
        products = tl.where(visible, products, -float("inf"))
        weights, rescale, peak, total = advance(products, unit, peak, total)
        b_o *= rescale[:, None]
        b_o = tl.dot(weights.to(b_v.dtype), b_v, b_o, input_precision="ieee")

    total, b_lse = finish(peak, total)
    row_out = (split.to(tl.int64) * num_tokens + token) * HQ + head
    tl.store(lse + row_out, b_lse, mask=mask_m)
    p_out = out + row_out[:, None] * D + index_d[None, :]
    b_o = (b_o / total[:, None]).to(out.dtype.element_ty)
    tl.store(p_out, b_o, mask=mask_q & (split_begin < split_end))
