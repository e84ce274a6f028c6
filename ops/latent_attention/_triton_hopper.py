"""Sizes of the form for Hopper of blocks of 64 rows (``_triton_hopper_kernel.py``)."""

from __future__ import annotations

from torch_hybrid.ops.latent_attention.op import LatentAttention
from torch_hybrid.ops.triton.devices import rows_are_aligned, runs_gluon

BLOCK_M = 64
RANK, ROPE = 512, 64
HOPPER_OPTIONS = {
    "STAGES": 2,  # of 64 latents: they fill what shared memory the queries leave
    "REGISTERS": 184,  # of a thread of the group that has half of the output alone
    "COPY_REGISTERS": 80,
    "num_warps": 4,
}


def serves(x: LatentAttention) -> bool:
    """Tell whether the form takes these queries and latents."""
    sizes = (x.q_latent.shape[2], x.q_rope.shape[2])
    aligned = all(map(rows_are_aligned, (x.q_latent, x.q_rope, x.pool)))
    return runs_gluon(x.pool.device) and x.pool.itemsize == 2 and sizes == (RANK, ROPE) and aligned
