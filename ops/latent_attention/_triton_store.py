"""Writing new latents into their pages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_hybrid.ops.latent_attention.op import LatentAttention
from torch_hybrid.ops.triton.fp8_kv import narrow
from torch_hybrid.ops.triton.launch import bind


def store_rows(x: LatentAttention, pool: Tensor) -> None:
    """Put the new rows into their pages.

    A launch of its own: the kernel that attends reads rows which other programs write here.

    Args:
        x: arguments of the op.
        pool: that of ``x``, as kernels can write it. Mutated.
    """
    num_tokens, rank = x.latent.shape
    rope_dim = x.k_rope.shape[1]
    bind(_store_kernel, x)[(num_tokens,)](
        pool=pool,
        ROPE=rope_dim,
        BLOCK_RANK=triton.next_power_of_2(rank),
        BLOCK_ROPE=triton.next_power_of_2(rope_dim),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_seqs"])
def _store_kernel(
    latent: tl.tensor,
    k_rope: tl.tensor,
    pool: tl.tensor,
    slot_mapping: tl.tensor,
    cu_seqlens: tl.tensor,
    pool_scale: tl.tensor,
    num_seqs: tl.tensor,
    stride_latent: tl.tensor,
    stride_k_rope: tl.tensor,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
) -> None:
    """Write the row of one token, in FP8 where ``pool_scale`` is given.

    Grid: tokens; those of padding do nothing. Tile: a whole row. Pipeline: none. Memory: the row
    ``slot_mapping`` names.
    """
    token = tl.program_id(0).to(tl.int64)
    if token < tl.load(cu_seqlens + num_seqs):
        p_row = pool + tl.load(slot_mapping + token).to(tl.int64) * (RANK + ROPE)
        index = tl.arange(0, BLOCK_RANK)
        b_c = tl.load(latent + token * stride_latent + index, mask=index < RANK)
        if pool_scale is not None:
            b_c = narrow(tl.div_rn(b_c.to(tl.float32), tl.load(pool_scale)), pool.dtype.element_ty)
        tl.store(p_row + index, b_c, mask=index < RANK)
        place = tl.arange(0, BLOCK_ROPE)
        b_k = tl.load(k_rope + token * stride_k_rope + place, mask=place < ROPE)
        if pool_scale is not None:
            b_k = narrow(tl.div_rn(b_k.to(tl.float32), tl.load(pool_scale)), pool.dtype.element_ty)
        tl.store(p_row + RANK + place, b_k, mask=place < ROPE)
