"""Long queries: a program walks the pages of earlier steps, then the rows of this one."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.paged_attention.op import Pages
from torch_hybrid.ops.triton.attention import attend_to_keys
from torch_hybrid.ops.triton.devices import PROCESSORS, is_hopper, multiplies_float32
from torch_hybrid.ops.triton.early import follow
from torch_hybrid.ops.triton.fp8_kv import as_float16
from torch_hybrid.ops.triton.hopper_attention import HopperTiles, attend_rows
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.ragged import num_blocks, tokens_of_block
from torch_hybrid.ops.triton.relative_bias import biases_of_rows, reach_of
from torch_hybrid.ops.triton.softmax import finish, log2_scale

# Keys of a window from which on the form for Hopper is the faster one.
LEAST_WINDOW = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTiles:
    """Tiles of a program: ``block_m`` rows of ``block_q`` tokens, ``block_kv`` keys at a time."""

    block_q: int
    block_m: int
    block_kv: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, x: Pages) -> LongTiles | None:
        """Choose tiles for queries; None where they do not fill a GPU, and elsewhere.

        What is done beside the products, for biases of FP8 keys, leaves registers for half as many
        keys.
        """
        num_tokens, num_q_heads, head_dim = x.q.shape
        num_kv_heads, num_seqs = x.k.shape[1], x.page_table.shape[0]
        narrow = x.kv_scales is not None and x.relative_bias is not None
        group = num_q_heads // num_kv_heads
        block_m = 128
        num_rows = num_tokens * group
        few = num_rows < block_m * max(num_seqs, -(-PROCESSORS // num_kv_heads))
        if x.q.itemsize != 2 or not is_hopper(x.q.device) or group > block_m or few:
            return None
        return cls(
            block_q=block_m // group,
            block_m=block_m,
            block_kv=32 if narrow else 64,
            num_warps=8,
            num_stages=2 if head_dim > 128 else 3,
        )


def attend_long(x: Pages, kv: Tensor, out: Tensor, lse: Tensor, tiles: LongTiles) -> None:
    """Attend to what earlier steps left in ``kv`` and to this step's rows; padding is left alone.

    FP8 keys are all read from the pages, which have the new rows as they were rounded.

    Args:
        x: arguments of the op.
        kv: ``x.kv`` in a dtype that kernels read.
        out, lse: results, [T, Hq, D] and [T, Hq]. **Mutated**.
        tiles: of the plain form.
    """
    q, k, v, page_table, window, bias = x.q, x.k, x.v, x.page_table, x.window, x.relative_bias
    hopper = None
    if not x.softcap and x.kv_scales is None and not 0 < window < LEAST_WINDOW:
        hopper = HopperTiles.of(q, k, v, kv, windowed=window > 0, biased=bias is not None)
    if hopper is not None:
        attend_rows(x, hopper, k, out, lse, kv=kv, window=window, relative_bias=bias)
        return
    num_tokens, _, head_dim = q.shape
    num_kv_heads, num_seqs = kv.shape[3], page_table.shape[0]
    bind(_long_kernel, x, tiles)[(num_blocks(num_tokens, num_seqs, tiles.block_q), num_kv_heads)](
        kv=kv,
        relative_bias=bias,
        out=out,
        lse=lse,
        scale_log2=log2_scale(x.softcap or x.scale),
        cap_scale=x.scale / x.softcap if x.softcap else 1.0,
        stride_table_page=page_table.stride(1),
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        HAS_WINDOW=window > 0,
        HAS_SOFTCAP=x.softcap > 0,
        REACH=reach_of(bias),
        FLOAT32_PRODUCTS=multiplies_float32(q),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=["num_seqs", "window"])
def _long_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
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
    num_seqs: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_kv: tl.tensor,
    stride_page_table: tl.tensor,
    stride_table_page: tl.tensor,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    REACH: tl.constexpr,
    FLOAT32_PRODUCTS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Attend from a block of tokens, in the query heads of one key head, to all that they see.

    Grid: blocks of tokens, key heads.
    A key is counted by its position in the sequence, wherever it lies.
    """
    follow(EARLY)
    GROUP: tl.constexpr = HQ // HKV
    head_kv = tl.program_id(1)
    # The last blocks of a sequence see the most keys: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    seq, begin, end, first_token = tokens_of_block(cu_seqlens, num_seqs, block, BLOCK_Q)
    if first_token >= end:
        return

    row = tl.arange(0, BLOCK_M)
    index_d = tl.arange(0, BLOCK_D)
    token = first_token + row // GROUP
    head = head_kv * GROUP + row % GROUP
    mask_m = (row < BLOCK_Q * GROUP) & (token < end)
    mask_q = mask_m[:, None] & (index_d < D)[None, :]
    offset_q = token.to(tl.int64) * stride_q_token + head * stride_q_head
    b_q = tl.load(q + offset_q[:, None] + index_d[None, :], mask=mask_q, other=0.0)
    q_worth = None
    if kv_scales is not None and b_q.dtype == tl.bfloat16:
        b_q, q_worth = as_float16(b_q)
    elif FLOAT32_PRODUCTS:
        b_q = b_q.to(tl.float32)

    ahead = tl.load(seq_lens + seq) - end  # of a token's number, to its position
    position = ahead + token
    num_held = ahead + begin
    keys_end = ahead + tl.minimum(first_token + BLOCK_Q, end)
    if kv_scales is not None:  # all of them are in pages
        num_held = keys_end
        if HAS_SOFTCAP:
            cap_scale *= tl.load(kv_scales + head_kv)
        else:
            scale_log2 *= tl.load(kv_scales + head_kv)
    # Where the block's walk starts in the pages, and in the rows of this step. What lies before a
    # window is not read: its pages may be somebody else's.
    held_begin, rows_begin = 0, num_held
    if HAS_WINDOW:
        seen_begin = tl.maximum(0, ahead + first_token - window + 1)
        held_begin = tl.minimum(seen_begin, num_held)
        rows_begin = tl.maximum(seen_begin, num_held)
    # Tiles that all rows see whole. What is left of the pages hides its own end; of the rows of
    # this step, what comes after a row's own token.
    held_whole = num_held // BLOCK_KV
    if kv_scales is not None:
        held_whole = (ahead + first_token + 1) // BLOCK_KV
    rows_whole = (first_token - begin + 1) // BLOCK_KV
    if HAS_WINDOW:
        held_whole, rows_whole = 0, 0
    if relative_bias is not None:  # and that no row has biases of
        far_end = tl.maximum(0, ahead + first_token - REACH + 1)
        held_whole = tl.minimum(held_whole, far_end // BLOCK_KV)
        rows_whole = tl.minimum(rows_whole, tl.maximum(0, far_end - num_held) // BLOCK_KV)
    held_left = tl.cdiv(num_held - held_begin, BLOCK_KV) - held_whole
    rows_left = tl.cdiv(keys_end - rows_begin, BLOCK_KV) - rows_whole

    biases = None
    if relative_bias is not None:
        biases = biases_of_rows(relative_bias, first_token, row, mask_m, head_kv, HQ, GROUP, REACH)

    peak = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    b_o = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    table = page_table + seq.to(tl.int64) * stride_page_table
    held_k = kv + head_kv * D
    held_v = held_k + stride_kv
    # From where the row of position 0 would be.
    first_row = tl.cast(begin - num_held, tl.int64)
    rows_k = k + first_row * stride_k_token + head_kv * stride_k_head
    rows_v = v + first_row * stride_v_token + head_kv * stride_v_head
    for hides in tl.static_range(2):
        b_o, peak, total = attend_to_keys(
            b_o,
            peak,
            total,
            b_q,
            position,
            held_begin + hides * held_whole * BLOCK_KV,
            held_left if hides else held_whole,
            num_held,
            held_k,
            held_v,
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
            q_worth=q_worth,
            table=table,
            stride_table_page=stride_table_page,
            PAGE_SIZE=PAGE_SIZE,
            window=window,
            cap_scale=cap_scale,
            HAS_WINDOW=HAS_WINDOW,
            HAS_SOFTCAP=HAS_SOFTCAP,
            biases=biases if hides else None,
            REACH=REACH,
        )
    if kv_scales is None:
        for hides in tl.static_range(2):
            b_o, peak, total = attend_to_keys(
                b_o,
                peak,
                total,
                b_q,
                position,
                rows_begin + hides * rows_whole * BLOCK_KV,
                rows_left if hides else rows_whole,
                keys_end,
                rows_k,
                rows_v,
                stride_k_token,
                stride_v_token,
                scale_log2,
                D,
                D,
                BLOCK_D,
                BLOCK_D,
                BLOCK_KV,
                hides,
                FLOAT32_PRODUCTS,
                window=window,
                cap_scale=cap_scale,
                HAS_WINDOW=HAS_WINDOW,
                HAS_SOFTCAP=HAS_SOFTCAP,
                biases=biases if hides else None,
                REACH=REACH,
            )

    total, b_lse = finish(peak, total)
    if kv_scales is not None:
        b_o *= tl.load(kv_scales + HKV + head_kv)
    row_out = token.to(tl.int64) * HQ + head
    tl.store(lse + row_out, b_lse, mask=mask_m)
    p_out = out + row_out[:, None] * D + index_d[None, :]
    tl.store(p_out, (b_o / total[:, None]).to(out.dtype.element_ty), mask=mask_q)
