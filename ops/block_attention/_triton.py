# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton": write the new rows, then attend, some programs for each query."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.block_attention.bounds import check_indices
from torch_hybrid.ops.block_attention.heads import by_head
from torch_hybrid.ops.triton.devices import PROCESSORS, interpreted
from torch_hybrid.ops.triton.ragged import sequence_of_token
from torch_hybrid.ops.triton.softmax import advance, finish, log2_scale, merge_splits

_BLOCK_KV = 64
_WIDE = 256  # heads that are wider leave room for fewer rows and keys
_SPLIT_KEYS = 256  # that a program has at least, where several share a query


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    kv: Tensor,
    blocks: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
    scale: float,
) -> Tensor:
    """Launcher of ``torch_hybrid::block_attention``."""
    num_tokens, num_q_heads, head_dim = q.shape
    (k, *_), kv = by_head(k, v, kv)
    _, _, page_size, num_kv_heads, _ = kv.shape
    num_seqs, top_k = page_table.shape[0], blocks.shape[1]
    if q.device.type == "cpu":
        check_indices(
            blocks,
            cu_seqlens,
            seq_lens,
            page_table,
            slot_mapping,
            num_pages=kv.shape[1],
            page_size=page_size,
            block_size=block_size,
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0 or num_seqs == 0:
        return out.zero_()
    _write_kernel[(num_tokens,)](
        k,
        v,
        kv,
        cu_seqlens,
        slot_mapping,
        num_seqs,
        k.stride(0),
        k.stride(1),
        0 if v is None else v.stride(0),
        0 if v is None else v.stride(1),
        kv.stride(0),
        HKV=num_kv_heads,
        D=head_dim,
        BLOCK=min(1024, triton.next_power_of_2(num_kv_heads * head_dim)),
        num_warps=4,
    )
    group = num_q_heads // num_kv_heads
    is_wide = head_dim > _WIDE
    most_rows = 64 if not is_wide else 32 if q.itemsize == 2 else 16
    block_m = min(most_rows, max(16, triton.next_power_of_2(group)))
    tiles = triton.cdiv(group, block_m)
    programs, most_keys = num_tokens * num_kv_heads * tiles, (top_k + 1) * block_size
    num_splits = min(
        triton.next_power_of_2(triton.cdiv(2 * PROCESSORS, programs)),
        triton.next_power_of_2(triton.cdiv(most_keys, _SPLIT_KEYS)),
    )
    to, lse = out, q.new_empty((num_splits, num_tokens, num_q_heads), dtype=torch.float32)
    if num_splits > 1:
        to = q.new_empty((num_splits, *out.shape), dtype=torch.float32)
    _attend_kernel[(num_tokens, num_kv_heads * tiles, num_splits)](
        q,
        kv,
        blocks,
        cu_seqlens,
        seq_lens,
        page_table,
        to,
        lse,
        log2_scale(scale),
        num_tokens,
        num_seqs,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        page_table.stride(0),
        GROUP=group,
        HKV=num_kv_heads,
        D=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_SIZE=block_size,
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_M=block_m,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_KV=16 if q.itemsize > 2 else _BLOCK_KV // (1 + is_wide),
        NUM_SPLITS=num_splits,
        # The interpreter holds bfloat16 as integers and multiplies them as such.
        FLOAT32_PRODUCTS=interpreted() and q.dtype == torch.bfloat16,
        HAS_VALUES=v is not None,
        num_warps=8 if is_wide else 4,
        num_stages=2 if q.itemsize == 2 else 1,
        enable_fp_fusion=True,
    )
    if num_splits > 1:
        merge_splits(to, lse, cu_seqlens, out, torch.empty_like(lse[0]))
    return out


@triton.jit(do_not_specialize=["num_seqs"])
def _write_kernel(
    k: tl.tensor,
    v: tl.tensor | None,
    kv: tl.tensor,
    cu_seqlens: tl.tensor,
    slot_mapping: tl.tensor,
    num_seqs: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_values: tl.tensor,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: the key and value of one token."""
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(cu_seqlens + num_seqs):
        return
    keys = kv + tl.load(slot_mapping + token).to(tl.int64) * HKV * D
    for base in range(0, HKV * D, BLOCK):
        index = base + tl.arange(0, BLOCK)
        mask = index < HKV * D
        head = index // D
        p_k = k + token * stride_k_token + head * stride_k_head + index % D
        tl.store(keys + index, tl.load(p_k, mask=mask), mask=mask)
        if v is not None:
            p_v = v + token * stride_v_token + head * stride_v_head + index % D
            tl.store(keys + stride_values + index, tl.load(p_v, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _attend_kernel(
    q: tl.tensor,
    kv: tl.tensor,
    blocks: tl.tensor,
    cu_seqlens: tl.tensor,
    seq_lens: tl.tensor,
    page_table: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    scale_log2: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_values: tl.tensor,
    stride_table: tl.tensor,
    GROUP: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    FLOAT32_PRODUCTS: tl.constexpr,
    HAS_VALUES: tl.constexpr,
) -> None:
    """One program: query heads of one key head of one token, and a split of what it sees.

    Its keys are numbered: those of its blocks in their order, then those of none.
    """
    token = tl.program_id(0)
    TILES: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(1) // TILES
    split = tl.program_id(2)
    row = tl.program_id(1) % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    index_d = tl.arange(0, BLOCK_D)
    mask_d = index_d[None, :] < D
    mask_m = (row < GROUP)[:, None] & mask_d
    head = kv_head * GROUP + row
    own = (split.to(tl.int64) * num_tokens + token) * HKV * GROUP + head
    p_out = out + own[:, None] * D + index_d[None, :]

    seq = sequence_of_token(cu_seqlens, num_seqs, token)
    if seq >= num_seqs:
        if NUM_SPLITS == 1:  # the merge of several knows what padding is
            tl.store(p_out, tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty), mask=mask_m)
        return
    position = tl.load(seq_lens + seq) - tl.load(cu_seqlens + seq + 1) + token
    chosen = blocks + token.to(tl.int64) * TOP_K
    index_k = tl.arange(0, BLOCK_K)
    b_chosen = tl.load(chosen + index_k, mask=index_k < TOP_K, other=-1)
    in_blocks = tl.sum((b_chosen >= 0).to(tl.int32), 0) * BLOCK_SIZE
    tail = (position + 1) // BLOCK_SIZE * BLOCK_SIZE
    num_keys = in_blocks + position + 1 - tail
    per_split = tl.cdiv(tl.cdiv(num_keys, NUM_SPLITS), BLOCK_KV) * BLOCK_KV
    first = split * per_split
    last = tl.minimum(first + per_split, num_keys)

    p_q = q + token.to(tl.int64) * stride_q_token + head * stride_q_head
    b_q = tl.load(p_q[:, None] + index_d[None, :], mask=mask_m, other=0.0)
    if FLOAT32_PRODUCTS:
        b_q = b_q.to(tl.float32)
    b_o = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    keys = kv + kv_head * D
    table = page_table + seq * stride_table
    # Tiles are counted from 0: with another lower bound the compiler loses sight of the alignment
    # of what is loaded, and loads element by element.
    for tile in range(tl.cdiv(last - first, BLOCK_KV)):
        number = first + tile * BLOCK_KV + tl.arange(0, BLOCK_KV)
        is_key = number < last
        is_chosen = is_key & (number < in_blocks)
        block = tl.load(chosen + number // BLOCK_SIZE, mask=is_chosen, other=0)
        key = tl.where(
            is_chosen, block * BLOCK_SIZE + number % BLOCK_SIZE, tail + number - in_blocks
        )
        page = tl.load(table + key // PAGE_SIZE, mask=is_key, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
        p_k = keys + slot[:, None] * (HKV * D)
        p_v = keys + stride_values + slot[:, None] * (HKV * D)
        mask = is_key[:, None] & ((index_d[None, :] < D) | (D == BLOCK_D))
        b_k = tl.load(p_k + index_d[None, :], mask=mask, other=0.0)
        b_v = b_k
        if HAS_VALUES:
            b_v = tl.load(p_v + index_d[None, :], mask=mask, other=0.0)
        if FLOAT32_PRODUCTS:
            b_k = b_k.to(tl.float32)
            b_v = b_v.to(tl.float32)
        products = tl.dot(b_q, tl.trans(b_k), out_dtype=tl.float32, input_precision="ieee")
        products = tl.where(is_key[None, :], products, -float("inf"))
        b_p, rescale, peak, total = advance(products, scale_log2, peak, total)
        b_o *= rescale[:, None]
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision="ieee")

    total, b_lse = finish(peak, total)
    tl.store(p_out, (b_o / total[:, None]).to(out.dtype.element_ty), mask=mask_m)
    if NUM_SPLITS > 1:
        tl.store(lse + own, b_lse, mask=row < GROUP)
