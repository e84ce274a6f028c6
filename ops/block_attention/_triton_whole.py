"""Queries that see all that is before them: those of a sequence share tiles of keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_hybrid.ops.block_attention.op import BlockAttention
from torch_hybrid.ops.triton.attention import attend_to_keys
from torch_hybrid.ops.triton.devices import multiplies_float32
from torch_hybrid.ops.triton.hopper_attention import HopperTiles, attend_rows
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.ragged import num_blocks, tokens_of_block
from torch_hybrid.ops.triton.softmax import finish, log2_scale

_MOST_DIMS = 256


def rows_of_tile(q: Tensor, *, num_kv_heads: int) -> int | None:
    """Count the rows, tokens times query heads, that share a tile of keys.

    None where they are too wide, or a token alone fills it.
    """
    num_q_heads, head_dim = q.shape[1:]
    rows = 64 if q.itemsize == 2 else 16
    shared = head_dim <= _MOST_DIMS and 2 * (num_q_heads // num_kv_heads) <= rows
    return rows if shared else None


def attend_whole(
    x: BlockAttention, k: Tensor, kv: Tensor, is_whole: Tensor, out: Tensor, *, block_m: int
) -> None:
    """Write the rows of queries that see all before them; to others of their tiles anything.

    Args:
        x: arguments of the op.
        k: [T, Hkv, D].
        kv: [planes, P, page_size, Hkv, D], which has the new rows.
        is_whole: [T] int32, whether a query is one of them.
    """
    q, v, page_table = x.q, x.v, x.page_table
    hopper = None if v is None else HopperTiles.of(q, k, v, kv)
    if hopper is not None:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        attend_rows(x, hopper, k, out, lse, kv=kv, wanted=is_whole)
        return
    num_tokens, num_q_heads, head_dim = q.shape
    planes, _, page_size, num_kv_heads, _ = kv.shape
    num_seqs = page_table.shape[0]
    group = num_q_heads // num_kv_heads
    tensor_cores = q.itemsize == 2
    block_q = block_m // group
    bind(_whole_kernel, x)[(num_blocks(num_tokens, num_seqs, block_q), num_kv_heads)](
        kv=kv,
        is_whole=is_whole,
        out=out,
        scale_log2=log2_scale(x.scale),
        stride_kv=kv.stride(0) if planes > 1 else 0,
        GROUP=group,
        HKV=num_kv_heads,
        PAGE_SIZE=page_size,
        BLOCK_Q=block_q,
        BLOCK_M=block_m,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_KV=64 if tensor_cores else 16,
        FLOAT32_PRODUCTS=multiplies_float32(q),
        num_warps=8 if tensor_cores else 4,
        num_stages=2,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["num_seqs"])
def _whole_kernel(
    q: tl.tensor,
    kv: tl.tensor,
    cu_seqlens: tl.tensor,
    seq_lens: tl.tensor,
    page_table: tl.tensor,
    is_whole: tl.tensor,
    out: tl.tensor,
    scale_log2: tl.tensor,
    num_seqs: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_kv: tl.tensor,
    stride_page_table: tl.tensor,
    GROUP: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    FLOAT32_PRODUCTS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Attend in a program for a block of tokens and the query heads of one key head.

    Every program waits for the rows that are written, also one that attends to none: what comes
    after this launch then comes after that one too.
    """
    if EARLY:
        gdc_launch_dependents()
    # The last blocks of a sequence see the most keys: they start first.
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    seq, _begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, place, BLOCK_Q)
    row = tl.arange(0, BLOCK_M)
    token = first_token + row // GROUP
    ahead = tl.load(seq_lens + seq) - end  # of a token's number, to its position
    position = ahead + token
    is_row = (row < BLOCK_Q * GROUP) & (token < end)
    if EARLY:
        gdc_wait()
    whole = tl.load(is_whole + token, mask=is_row, other=0)
    keys_end = tl.max(tl.where(whole > 0, position + 1, 0), 0)
    if keys_end == 0:
        return

    index_d = tl.arange(0, BLOCK_D)
    head = tl.program_id(1) * GROUP + row % GROUP
    mask = is_row[:, None] & (index_d < D)[None, :]
    p_q = q + token.to(tl.int64) * stride_q_token + head * stride_q_head
    b_q = tl.load(p_q[:, None] + index_d[None, :], mask=mask, other=0.0)
    if FLOAT32_PRODUCTS:
        b_q = b_q.to(tl.float32)
    b_o = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    keys = kv + tl.program_id(1) * D
    # Tiles that all of the rows see whole, then those that hide keys from some.
    num_whole = tl.minimum(ahead + first_token + 1, keys_end) // BLOCK_KV
    num_left = tl.cdiv(keys_end, BLOCK_KV) - num_whole
    for hides in tl.static_range(2):
        b_o, peak, total = attend_to_keys(
            b_o,
            peak,
            total,
            b_q,
            position,
            hides * num_whole * BLOCK_KV,
            num_left if hides else num_whole,
            keys_end,
            keys,
            keys + stride_kv,
            HKV * D,
            HKV * D,
            scale_log2,
            D,
            D,
            BLOCK_D,
            BLOCK_D,
            BLOCK_KV,
            hides,
            FLOAT32_PRODUCTS,
            table=page_table + seq * stride_page_table,
            stride_table_page=1,
            PAGE_SIZE=PAGE_SIZE,
        )
    total, _ = finish(peak, total)
    p_out = out + (token.to(tl.int64) * HKV * GROUP + head)[:, None] * D + index_d[None, :]
    tl.store(p_out, (b_o / total[:, None]).to(out.dtype.element_ty), mask=mask)
