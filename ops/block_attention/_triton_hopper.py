"""Launcher of the form for Hopper of latents of chosen blocks (``_triton_hopper_kernel.py``)."""

from __future__ import annotations

import triton
from torch import Tensor

from torch_hybrid.ops.block_attention.op import BlockAttention
from torch_hybrid.ops.triton.devices import rows_are_aligned, runs_gluon
from torch_hybrid.ops.triton.launch import bind
from torch_hybrid.ops.triton.padding import set_padding
from torch_hybrid.ops.triton.softmax import log2_scale

BLOCK_M = 64
_RANK = 512
# Two tiles of 64 latents fill what shared memory the queries leave.
_BLOCK_KV, _STAGES = 64, 2
# Of a thread of the group that has half of the output alone, and of one that copies.
_REGISTERS, _COPY_REGISTERS = 184, 80


def serves(q: Tensor, pool: Tensor) -> bool:
    """Tell whether the form takes these queries [T, H, D] and latents [P, page, D]."""
    fits = q.itemsize == 2 and q.shape[1] > 16 and q.shape[2] == _RANK
    return runs_gluon(q.device) and fits and rows_are_aligned(q) and rows_are_aligned(pool)


def attend_on_hopper(
    x: BlockAttention,
    pool: Tensor,
    k: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    num_splits: int,
) -> None:
    """Attend within each split of the keys; ``out`` and ``lse`` hold the splits in a row.

    ``k``, if there is such, are the latents [T, 1, D] that no launch has written. Padding is
    filled where there is one split, and else left to the merge.
    """
    from torch_hybrid.ops.block_attention._triton_hopper_kernel import hopper_gather_kernel

    q = x.q
    num_tokens, num_heads, _ = q.shape
    top_k = x.blocks.shape[1]
    if num_splits == 1:
        set_padding(out, lse[0], x.cu_seqlens)
    bind(hopper_gather_kernel, x)[(num_tokens, triton.cdiv(num_heads, BLOCK_M), num_splits)](
        pool=pool,
        k=k,
        slot_mapping=None if k is None else x.slot_mapping,
        out=out,
        lse=lse,
        scale_log2=log2_scale(x.scale),
        H=num_heads,
        RANK=_RANK,
        PAGE_SIZE=pool.shape[1],
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        M=BLOCK_M,
        BLOCK_KV=_BLOCK_KV,
        STAGES=_STAGES,
        NUM_SPLITS=num_splits,
        REGISTERS=_REGISTERS,
        COPY_REGISTERS=_COPY_REGISTERS,
        num_warps=4,
    )
