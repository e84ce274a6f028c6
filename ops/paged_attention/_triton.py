# mypy: disable-error-code="untyped-decorator"
"""Implementation "triton": write the new rows, attend in key splits, merge the splits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.page_bounds import check_page_indices
from torch_hybrid.ops.triton.devices import interpreted
from torch_hybrid.ops.triton.ragged import first_token_of_block, num_blocks, sequence_of_block

# Two programs for each processor of the GPUs this is meant for (108 to 148 processors).
_TARGET_PROGRAMS = 256
_MAX_SPLITS = 128

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How the work is cut. Decided by shapes alone, so that a captured graph serves any lengths.

    A program owns ``block_q`` consecutive tokens of one sequence and one key head; its
    ``block_m`` rows are those tokens times the query heads that share the key head.
    """

    block_q: int
    block_m: int
    block_d: int
    block_kv: int
    num_blocks: int
    num_splits: int
    num_warps: int

    @classmethod
    def of(
        cls,
        *,
        num_tokens: int,
        num_seqs: int,
        num_kv_heads: int,
        group: int,
        head_dim: int,
        itemsize: int,
        max_keys: int,
    ) -> Tiles:
        """Tiles for ``num_tokens`` of ``num_seqs`` sequences of at most ``max_keys`` keys each."""
        # float32 products run outside the tensor cores, on operands held in registers: larger
        # tiles spill.
        tensor_cores = itemsize == 2
        block_d = max(16, triton.next_power_of_2(head_dim))
        tokens_per_seq = triton.cdiv(num_tokens, max(1, num_seqs))
        wanted_rows = triton.next_power_of_2(tokens_per_seq * group)
        most_rows = 64 if tensor_cores else 16
        block_m = max(16, min(wanted_rows, most_rows), triton.next_power_of_2(group))
        block_q = block_m // group
        block_kv = (64 if block_m < 64 else 32) if tensor_cores else 16
        busy_programs = max(num_seqs, num_tokens // block_q) * num_kv_heads
        wanted_splits = min(_MAX_SPLITS, _TARGET_PROGRAMS // max(1, busy_programs))
        useful_splits = triton.cdiv(max_keys, block_kv)
        num_splits = max(1, min(wanted_splits, useful_splits))
        return cls(
            block_q=block_q,
            block_m=block_m,
            block_d=block_d,
            block_kv=block_kv,
            num_blocks=num_blocks(num_tokens, num_seqs, block_q),
            num_splits=1 << (num_splits.bit_length() - 1),
            num_warps=4 if block_m <= most_rows else 8,
        )


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Launcher of ``torch_hybrid::paged_attention``."""
    out, _ = paged_attention_with_lse(
        q,
        k,
        v,
        kv,
        cu_seqlens,
        seq_lens,
        page_table,
        slot_mapping,
        scale=scale,
        window=window,
        softcap=softcap,
    )
    return out


def paged_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``torch_hybrid::paged_attention_with_lse``."""
    if interpreted() and kv.device.type == "cpu":
        check_page_indices(
            cu_seqlens,
            seq_lens,
            page_table,
            slot_mapping,
            num_pages=kv.shape[1],
            page_size=kv.shape[2],
            window=window,
        )
    num_tokens, num_q_heads, head_dim = q.shape
    _, _, page_size, num_kv_heads, _ = kv.shape
    num_seqs, max_pages = page_table.shape
    tiles = Tiles.of(
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        num_kv_heads=num_kv_heads,
        group=num_q_heads // num_kv_heads,
        head_dim=head_dim,
        itemsize=kv.itemsize,
        max_keys=max_pages * page_size,
    )
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(num_tokens, num_q_heads, dtype=torch.float32, device=q.device)
    _write(k, v, kv, cu_seqlens, slot_mapping, out, lse)
    if tiles.num_splits == 1:
        _attend(q, kv, cu_seqlens, seq_lens, page_table, out, lse, scale, window, softcap, tiles)
        return out, lse
    partial_out = torch.empty(tiles.num_splits, *q.shape, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(tiles.num_splits, *lse.shape, dtype=torch.float32, device=q.device)
    _attend(
        q,
        kv,
        cu_seqlens,
        seq_lens,
        page_table,
        partial_out,
        partial_lse,
        scale,
        window,
        softcap,
        tiles,
    )
    _merge(partial_out, partial_lse, cu_seqlens, out, lse, tiles)
    return out, lse


def _write(
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    slot_mapping: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Put the new rows into their pages, and the identity of a merge into padding rows.

    A launch of its own: the kernel that attends reads rows which other programs write here.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    _write_kernel[(num_tokens,)](
        k,
        v,
        kv,
        cu_seqlens,
        slot_mapping,
        out,
        lse,
        cu_seqlens.shape[0] - 1,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        kv.stride(0),
        HQ=out.shape[1],
        HKV=num_kv_heads,
        D=head_dim,
        BLOCK_HQ=triton.next_power_of_2(out.shape[1]),
        BLOCK=min(1024, triton.next_power_of_2(num_kv_heads * head_dim)),
        num_warps=4,
        enable_fp_fusion=True,
    )


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
        out,
        lse,
        scale / softcap if softcap else scale * _LOG2_E,
        softcap * _LOG2_E,
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
        # The interpreter holds bfloat16 as integers and multiplies them as such.
        FLOAT32_PRODUCTS=interpreted() and q.dtype == torch.bfloat16,
        num_warps=tiles.num_warps,
        num_stages=3,  # page numbers are fetched two tiles ahead, keys and values one
        enable_fp_fusion=True,
    )


def _merge(
    partial_out: Tensor,
    partial_lse: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Tiles,
) -> None:
    """Weigh the splits of each row by their share of the softmax."""
    num_tokens, num_q_heads, head_dim = out.shape
    block_splits = min(tiles.num_splits, 32)
    block_d = min(tiles.block_d, 4096 // block_splits)
    _merge_kernel[(num_tokens, num_q_heads, triton.cdiv(head_dim, block_d))](
        partial_out,
        partial_lse,
        cu_seqlens,
        out,
        lse,
        num_tokens,
        cu_seqlens.shape[0] - 1,
        HQ=num_q_heads,
        D=head_dim,
        BLOCK_D=block_d,
        NUM_SPLITS=tiles.num_splits,
        BLOCK_SPLITS=block_splits,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["num_seqs"])
def _write_kernel(
    k: tl.tensor,
    v: tl.tensor,
    kv: tl.tensor,
    cu_seqlens: tl.tensor,
    slot_mapping: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    num_seqs: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_values: tl.tensor,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HQ: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one token."""
    token = tl.program_id(0).to(tl.int64)
    if token < tl.load(cu_seqlens + num_seqs):
        slot = tl.load(slot_mapping + token).to(tl.int64)
        keys = kv + slot * HKV * D
        values = keys + stride_values
        for base in range(0, HKV * D, BLOCK):
            index = base + tl.arange(0, BLOCK)
            mask = index < HKV * D
            head = index // D
            p_k = k + token * stride_k_token + head * stride_k_head + index % D
            p_v = v + token * stride_v_token + head * stride_v_head + index % D
            tl.store(keys + index, tl.load(p_k, mask=mask), mask=mask)
            tl.store(values + index, tl.load(p_v, mask=mask), mask=mask)
    else:
        for base in range(0, HQ * D, BLOCK):
            index = base + tl.arange(0, BLOCK)
            zeros = tl.zeros_like(index).to(out.dtype.element_ty)
            tl.store(out + token * HQ * D + index, zeros, mask=index < HQ * D)
        head = tl.arange(0, BLOCK_HQ)
        nothing = tl.full([BLOCK_HQ], -float("inf"), dtype=tl.float32)
        tl.store(lse + token * HQ + head, nothing, mask=head < HQ)


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "window"])
def _attend_kernel(
    q: tl.tensor,
    kv: tl.tensor,
    cu_seqlens: tl.tensor,
    seq_lens: tl.tensor,
    page_table: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    logit_scale: tl.tensor,
    softcap_log2: tl.tensor,
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
    keys_end = ahead + tl.minimum(first_token + BLOCK_Q, end)
    tiles_per_split = tl.cdiv(tl.cdiv(keys_end - keys_begin, BLOCK_KV), NUM_SPLITS)
    split_begin = keys_begin + split * tiles_per_split * BLOCK_KV
    split_end = tl.minimum(keys_end, split_begin + tiles_per_split * BLOCK_KV)

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
        page = tl.load(table + key // PAGE_SIZE * stride_table_page, mask=mask_key, other=0)
        slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
        p_k = heads[None, :] + slot[:, None] * (HKV * D)
        mask_kv = mask_key[:, None] & mask_d[None, :]
        b_k = tl.load(p_k, mask=mask_kv, other=0.0)
        b_v = tl.load(p_k + stride_values, mask=mask_kv, other=0.0)
        if FLOAT32_PRODUCTS:
            b_k = b_k.to(tl.float32)
            b_v = b_v.to(tl.float32)

        logits = tl.dot(b_q, tl.trans(b_k), out_dtype=tl.float32, input_precision="ieee")
        logits *= logit_scale
        if HAS_SOFTCAP:
            logits = _tanh(logits) * softcap_log2
        visible = key[None, :] <= position[:, None]
        if HAS_WINDOW:
            visible &= key[None, :] > position[:, None] - window
        logits = tl.where(visible, logits, -float("inf"))

        new_peak = tl.maximum(peak, tl.max(logits, 1))
        shift = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # no key was visible so far
        weights = tl.exp2(logits - shift[:, None])
        rescale = tl.exp2(peak - shift)
        total = total * rescale + tl.sum(weights, 1)
        b_o *= rescale[:, None]
        b_o = tl.dot(weights.to(b_v.dtype), b_v, b_o, input_precision="ieee")
        peak = new_peak

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    b_lse = tl.where(empty, -float("inf"), (peak + tl.log2(total)) * 0.6931471805599453)
    row_out = (split.to(tl.int64) * num_tokens + token) * HQ + head
    tl.store(lse + row_out, b_lse, mask=mask_m)
    p_out = out + row_out[:, None] * D + index_d[None, :]
    b_o = (b_o / total[:, None]).to(out.dtype.element_ty)
    tl.store(p_out, b_o, mask=mask_q & (split_begin < split_end))


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _merge_kernel(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    cu_seqlens: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    HQ: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
) -> None:
    """One program: BLOCK_D elements of one query head of one token."""
    token = tl.program_id(0)
    if token >= tl.load(cu_seqlens + num_seqs):
        return
    row = token.to(tl.int64) * HQ + tl.program_id(1)
    stride_split = num_tokens.to(tl.int64) * HQ
    index_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = index_d < D

    b_lse = tl.load(partial_lse + row + tl.arange(0, NUM_SPLITS) * stride_split)
    peak = tl.max(b_lse, 0)
    shift = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.sum(tl.exp(b_lse - shift), 0)
    total = tl.where(total == 0.0, 1.0, total)

    b_o = tl.zeros([BLOCK_D], dtype=tl.float32)
    for base in range(0, NUM_SPLITS, BLOCK_SPLITS):
        split_row = row + (base + tl.arange(0, BLOCK_SPLITS)) * stride_split
        weights = tl.exp(tl.load(partial_lse + split_row) - shift)
        # A split without keys has written no output.
        mask = (weights > 0.0)[:, None] & mask_d[None, :]
        p_o = partial_out + split_row[:, None] * D + index_d[None, :]
        b_o += tl.sum(tl.load(p_o, mask=mask, other=0.0) * weights[:, None], 0)
    tl.store(out + row * D + index_d, (b_o / total).to(out.dtype.element_ty), mask=mask_d)
    if tl.program_id(2) == 0:
        tl.store(lse + row, peak + tl.log(total))


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """Hyperbolic tangent to float32 precision, also where 1 - exp(-2x) would cancel."""
    t = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - t) / (1.0 + t)
    large = tl.where(x < 0, -large, large)
    s = x * x
    small = x + x * s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835))))
    return tl.where(tl.abs(x) < 0.25, small, large)
