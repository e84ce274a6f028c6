"""Implementation "triton": a program owns a block of one sequence's queries and walks its keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.ragged_attention.op import RaggedAttentionWithLse
from torch_hybrid.ops.triton.attention import attend_to_keys
from torch_hybrid.ops.triton.devices import is_hopper, multiplies_float32
from torch_hybrid.ops.triton.hopper_attention import BLOCK_M, HopperTiles, attend_rows
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.padding import set_padding
from torch_hybrid.ops.triton.ragged import num_blocks, tokens_of_block
from torch_hybrid.ops.triton.softmax import finish, log2_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Sizes that the work is cut in, from shapes alone: a captured graph serves any lengths.

    ``block_m`` rows are ``block_q`` tokens times the query heads that share a key head. A head's
    dims are cut in two powers of two, 192 in 128 and 64; ``block_d_rest`` may be 0.
    """

    block_q: int
    block_m: int
    block_d: int
    block_d_rest: int
    block_v: int
    block_kv: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(
        cls,
        *,
        num_tokens: int,
        num_seqs: int,
        group: int,
        head_dim: int,
        v_head_dim: int,
        like: Tensor,
    ) -> Tiles:
        """Choose tiles for inputs of the dtype and device of ``like``.

        float32 products run outside the tensor cores, on operands held in registers.
        """
        tensor_cores, hopper = like.itemsize == 2, is_hopper(like.device)
        wanted_rows = triton.next_power_of_2(triton.cdiv(num_tokens, num_seqs) * group)
        dims = head_dim + v_head_dim
        large = dims > 320 and not hopper
        most_rows = 16 if not tensor_cores else 64 if large else 128
        block_m = max(16, min(wanted_rows, most_rows), triton.next_power_of_2(group))
        # As many keys as leave no row in slower memory.
        block_kv = 32 if dims > 320 or (dims > 256 and not hopper) else 64
        whole = triton.next_power_of_2(head_dim)
        block_d = max(16, whole if whole == head_dim else whole // 2)
        rest = head_dim - block_d
        return cls(
            block_q=block_m // group,
            block_m=block_m,
            block_d=block_d,
            block_d_rest=max(16, triton.next_power_of_2(rest)) if rest > 0 else 0,
            block_v=max(16, triton.next_power_of_2(v_head_dim)),
            block_kv=block_kv if tensor_cores else 16,
            num_warps=8 if block_m > 64 or large else 4,
            num_stages=3 if hopper else 2,
        )


def ragged_attention_with_lse(x: RaggedAttentionWithLse) -> tuple[Tensor, Tensor]:
    """Launch ``torch_hybrid::ragged_attention_with_lse``."""
    q, k, v, cu_seqlens_q = x.q, x.k, x.v, x.cu_seqlens_q
    num_tokens, num_heads, head_dim = q.shape
    _, num_k_heads, v_head_dim = v.shape
    num_seqs = cu_seqlens_q.shape[0] - 1
    out = q.new_empty(num_tokens, num_heads, v_head_dim)
    lse = q.new_empty(num_tokens, num_heads, dtype=torch.float32)
    if num_seqs == 0:
        return out.zero_(), lse.fill_(-math.inf)
    tiles = Tiles.of(
        num_tokens=num_tokens,
        num_seqs=num_seqs,
        group=num_heads // num_k_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        like=q,
    )
    hopper = HopperTiles.of(q, k, v) if tiles.block_m == BLOCK_M else None
    if hopper is not None:
        set_padding(out, lse, cu_seqlens_q)
        attend_rows(x, hopper, k, out, lse, causal=x.causal)
        return out, lse
    bind(_attend_kernel, x, tiles)[(num_blocks(num_tokens, num_seqs, tiles.block_q), num_k_heads)](
        out=out,
        lse=lse,
        scale_log2=log2_scale(x.scale),
        num_seqs=num_seqs,
        V=v_head_dim,
        FLOAT32_PRODUCTS=multiplies_float32(q),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
    )
    return out, lse


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def _attend_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cu_seqlens_q: tl.tensor,
    cu_seqlens_k: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    scale_log2: tl.tensor,
    num_tokens: tl.tensor,
    num_seqs: tl.tensor,
    stride_q_token: tl.tensor,
    stride_q_head: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CAUSAL: tl.constexpr,
    FLOAT32_PRODUCTS: tl.constexpr,
) -> None:
    """Attend from a block of queries, of the query heads of one key head.

    Grid: blocks of BLOCK_Q tokens, the longest first, and key heads. Tile: BLOCK_M rows by BLOCK_KV
    keys; tiles that all rows see come first, then those that hide keys from some. Pipeline: the
    compiler's, of ``num_stages`` tiles. Memory: padding and rows without keys are filled here.
    """
    GROUP: tl.constexpr = H // HK
    head_k = tl.program_id(1)
    # The last blocks of a sequence may see the most keys: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    row = tl.arange(0, BLOCK_M)
    head = head_k * GROUP + row % GROUP
    is_row = row < BLOCK_Q * GROUP
    index_d = tl.arange(0, BLOCK_D)
    index_v = tl.arange(0, BLOCK_V)
    mask_d = index_d < D
    mask_v = index_v < V
    if BLOCK_D_REST > 0:
        index_rest = BLOCK_D + tl.arange(0, BLOCK_D_REST)
        mask_rest = index_rest < D

    # The grid has a block for any BLOCK_Q tokens in a row: their padding is filled here.
    token = block * BLOCK_Q + row // GROUP
    is_padding = is_row & (token >= tl.load(cu_seqlens_q + num_seqs)) & (token < num_tokens)
    row_out = token.to(tl.int64) * H + head
    zeros = tl.zeros([BLOCK_M, BLOCK_V], dtype=out.dtype.element_ty)
    nothing = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    p_out = out + row_out[:, None] * V + index_v[None, :]
    tl.store(p_out, zeros, mask=is_padding[:, None] & mask_v[None, :])
    tl.store(lse + row_out, nothing, mask=is_padding)

    seq, _begin, end, first_token = tokens_of_block(cu_seqlens_q, num_seqs, block, BLOCK_Q)
    if first_token >= end:
        return
    token = first_token + row // GROUP
    mask_m = is_row & (token < end)
    p_q = q + (token.to(tl.int64) * stride_q_token + head * stride_q_head)[:, None]
    b_q = tl.load(p_q + index_d[None, :], mask=mask_m[:, None] & mask_d[None, :], other=0.0)
    if FLOAT32_PRODUCTS:
        b_q = b_q.to(tl.float32)
    b_q_rest = None
    if BLOCK_D_REST > 0:
        mask_q = mask_m[:, None] & mask_rest[None, :]
        b_rest = tl.load(p_q + index_rest[None, :], mask=mask_q, other=0.0)
        b_q_rest = b_rest.to(tl.float32) if FLOAT32_PRODUCTS else b_rest

    first_key = tl.load(cu_seqlens_k + seq).to(tl.int64)
    num_keys = tl.load(cu_seqlens_k + seq + 1) - tl.load(cu_seqlens_k + seq)
    keys_end, num_whole = num_keys, num_keys
    position = num_keys - 1 + tl.zeros([BLOCK_M], dtype=tl.int32)
    if CAUSAL:
        ahead = num_keys - end  # of a token's number, to its position
        position = ahead + token
        keys_end = tl.maximum(0, ahead + tl.minimum(first_token + BLOCK_Q, end))
        num_whole = tl.maximum(0, ahead + first_token + 1)
    tiles_whole = num_whole // BLOCK_KV  # that all rows see
    tiles_left = tl.cdiv(keys_end, BLOCK_KV) - tiles_whole
    peak = nothing
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    b_o = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    for hides in tl.static_range(2):
        b_o, peak, total = attend_to_keys(
            b_o,
            peak,
            total,
            b_q,
            position,
            hides * tiles_whole * BLOCK_KV,
            tiles_left if hides else tiles_whole,
            keys_end,
            k + first_key * stride_k_token + head_k * stride_k_head,
            v + first_key * stride_v_token + head_k * stride_v_head,
            stride_k_token,
            stride_v_token,
            scale_log2,
            D,
            V,
            BLOCK_D,
            BLOCK_V,
            BLOCK_KV,
            hides,
            FLOAT32_PRODUCTS,
            b_q_rest=b_q_rest,
            BLOCK_D_REST=BLOCK_D_REST,
        )

    total, b_lse = finish(peak, total)
    row_out = token.to(tl.int64) * H + head
    tl.store(lse + row_out, b_lse, mask=mask_m)
    p_out = out + row_out[:, None] * V + index_v[None, :]
    b_o = (b_o / total[:, None]).to(out.dtype.element_ty)
    tl.store(p_out, b_o, mask=mask_m[:, None] & mask_v[None, :])
