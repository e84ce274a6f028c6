"""64 rows on Hopper: two groups of warps share the output, others copy latents beside them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from torch_hybrid.ops.latent_attention._triton_hopper_groups import (
    attend_first,
    attend_second,
    copy_latents,
    rows_of_block,
)
from torch_hybrid.ops.triton.hopper import (
    COPIED,
    COPYING_THREADS,
    ROWS,
    new_barriers,
    sequence_of_block,
)


@gluon.jit(do_not_specialize=["num_tokens", "num_seqs", "stride_page_table"])
def hopper_attend_kernel(
    q_latent: gl.tensor,
    q_rope: gl.tensor,
    pool: gl.tensor,
    cu_seqlens: gl.tensor,
    seq_lens: gl.tensor,
    page_table: gl.tensor,
    out: gl.tensor,
    lse: gl.tensor,
    scale_log2: gl.tensor,
    num_tokens: gl.tensor,
    num_seqs: gl.tensor,
    stride_q_latent_token: gl.tensor,
    stride_q_latent_head: gl.tensor,
    stride_q_rope_token: gl.tensor,
    stride_q_rope_head: gl.tensor,
    stride_page_table: gl.tensor,
    stride_table_page: gl.tensor,
    H: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    STAGES: gl.constexpr,
    NUM_SPLITS: gl.constexpr,
    REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
) -> None:
    """Attend from a block of tokens and heads to one split of the keys.

    Grid: blocks of BLOCK_Q tokens, blocks of BLOCK_H heads, splits. Tile: 64 rows by BLOCK_KV
    latents. Pipeline: a group of warps copies STAGES tiles ahead of two that compute. Memory:
    queries and tiles in shared memory. Padding is left alone.
    """
    M: gl.constexpr = BLOCK_Q * BLOCK_H
    HALF: gl.constexpr = RANK // 2
    split = gl.program_id(2)
    seq = sequence_of_block(cu_seqlens, num_seqs, gl.program_id(0), BLOCK_Q)
    begin = gl.load(cu_seqlens + seq)
    end = gl.load(cu_seqlens + seq + 1)
    first_token = begin + (gl.program_id(0) - begin // BLOCK_Q - seq) * BLOCK_Q
    if first_token < end:
        block = (first_token, end, gl.program_id(1) * BLOCK_H, H)
        row = gl.arange(0, M, gl.SliceLayout(1, COPIED))
        token, head, mask = rows_of_block(block, BLOCK_H, row)
        token = token.to(gl.int64)[:, None]
        p_latent = q_latent + token * stride_q_latent_token + head[:, None] * stride_q_latent_head
        p_rope = q_rope + token * stride_q_rope_token + head[:, None] * stride_q_rope_head
        index_half = gl.arange(0, HALF, gl.SliceLayout(0, COPIED))[None, :]
        index_rope = gl.arange(0, ROPE, gl.SliceLayout(0, COPIED))[None, :]
        dtype: gl.constexpr = pool.dtype.element_ty
        b_q_first = gl.allocate_shared_memory(dtype, [M, HALF], ROWS)
        b_q_second = gl.allocate_shared_memory(dtype, [M, HALF], ROWS)
        b_q_rope = gl.allocate_shared_memory(dtype, [M, ROPE], ROWS)
        is_row = mask[:, None]
        async_copy.async_copy_global_to_shared(b_q_rope, p_rope + index_rope, mask=is_row)
        async_copy.async_copy_global_to_shared(b_q_first, p_latent + index_half, mask=is_row)
        p_second = p_latent + (HALF + index_half)
        async_copy.async_copy_global_to_shared(b_q_second, p_second, mask=is_row)
        q_ready = new_barriers(1, COPYING_THREADS).index(0)
        async_copy.mbarrier_arrive(q_ready, increment_count=False)

        ahead = gl.load(seq_lens + seq) - end  # of a token's number, to its position
        keys_end = ahead + gl.minimum(first_token + BLOCK_Q, end)
        split_keys = gl.cdiv(gl.cdiv(keys_end, BLOCK_KV), NUM_SPLITS) * BLOCK_KV
        split_begin = split * split_keys
        split_end = gl.minimum(keys_end, split_begin + split_keys)
        num_tiles = gl.cdiv(gl.maximum(0, split_end - split_begin), BLOCK_KV)
        keys = (split_begin, split_end, num_tiles)

        b_first = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_KV, HALF], ROWS)
        b_second = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_KV, HALF], ROWS)
        b_rope = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_KV, ROPE], ROWS)
        b_weights = gl.allocate_shared_memory(dtype, [M, BLOCK_KV], ROWS)
        L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        b_factors = gl.allocate_shared_memory(gl.float32, [M], L)
        bufs = (b_first, b_second, b_rope, b_weights, b_factors)
        ready = new_barriers(2 * STAGES, COPYING_THREADS)
        weights_ready = new_barriers(1, 1).index(0)
        weights_free = new_barriers(1, 1).index(0)
        bars = (ready, new_barriers(2 * STAGES, 1), weights_ready, weights_free, q_ready)
        outputs = (out, lse, split.to(gl.int64) * num_tokens)
        queries = (b_q_first, b_q_second, b_q_rope)
        pages = (pool, page_table + seq.to(gl.int64) * stride_page_table, stride_table_page)
        gl.warp_specialize(
            [
                (attend_first, (outputs, queries, block, keys, ahead, scale_log2, bars, bufs,
                                BLOCK_H, M, HALF, BLOCK_KV, STAGES)),
                (attend_second, (outputs, block, keys, bars, bufs, BLOCK_H, M, HALF, STAGES)),
                (copy_latents, (pages, keys, bars, bufs, RANK, ROPE, PAGE_SIZE, BLOCK_KV, STAGES)),
            ],
            [4, 4],
            [REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
