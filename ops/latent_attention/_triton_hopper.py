"""Launch of the form for Hopper of blocks of 64 rows (``_triton_hopper_kernel.py``)."""

from __future__ import annotations

import triton
from torch import Tensor

from torch_hybrid.ops.latent_attention._triton_tiles import Tiles
from torch_hybrid.ops.latent_attention.op import LatentAttention
from torch_hybrid.ops.triton.devices import rows_are_aligned, runs_gluon
from torch_hybrid.ops.triton.padding import set_padding
from torch_hybrid.ops.triton.ragged import num_blocks
from torch_hybrid.ops.triton.softmax import log2_scale

BLOCK_M = 64
RANK, ROPE = 512, 64
# Two tiles of 64 latents fill what shared memory the queries leave.
BLOCK_KV, STAGES = 64, 2
# Of a thread of the group that has half of the output alone, and of one that copies.
REGISTERS, COPY_REGISTERS = 184, 80


def serves(x: LatentAttention) -> bool:
    """Tell whether the form takes these queries and latents."""
    sizes = (x.q_latent.shape[2], x.q_rope.shape[2])
    aligned = all(map(rows_are_aligned, (x.q_latent, x.q_rope, x.pool)))
    return runs_gluon(x.pool.device) and x.pool.itemsize == 2 and sizes == (RANK, ROPE) and aligned


def attend_on_hopper(x: LatentAttention, out: Tensor, lse: Tensor, tiles: Tiles) -> None:
    """Attend within each split of the keys; ``out`` and ``lse`` hold the splits in a row.

    Padding is filled where there is one split, and else left to the merge.
    """
    from torch_hybrid.ops.latent_attention._triton_hopper_kernel import hopper_attend_kernel

    q_latent, q_rope, page_table = x.q_latent, x.q_rope, x.page_table
    num_tokens, num_heads, _ = q_latent.shape
    num_seqs = page_table.shape[0]
    block_h = BLOCK_M // tiles.block_q
    if tiles.num_splits == 1:
        set_padding(out, lse, x.cu_seqlens)
    grid = (
        num_blocks(num_tokens, num_seqs, tiles.block_q),
        triton.cdiv(num_heads, block_h),
        tiles.num_splits,
    )
    hopper_attend_kernel[grid](
        q_latent,
        q_rope,
        x.pool,
        x.cu_seqlens,
        x.seq_lens,
        page_table,
        out,
        lse,
        log2_scale(x.scale),
        num_tokens,
        num_seqs,
        q_latent.stride(0),
        q_latent.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        page_table.stride(0),
        page_table.stride(1),
        H=num_heads,
        RANK=RANK,
        ROPE=ROPE,
        PAGE_SIZE=x.pool.shape[1],
        BLOCK_Q=tiles.block_q,
        BLOCK_H=block_h,
        BLOCK_KV=BLOCK_KV,
        STAGES=STAGES,
        NUM_SPLITS=tiles.num_splits,
        REGISTERS=REGISTERS,
        COPY_REGISTERS=COPY_REGISTERS,
        num_warps=4,
    )
