"""Implementations "flashinfer_trtllm" and "flashinfer_cute_dsl": decode over latents on Blackwell.

FlashInfer has the kernels of the one as binaries, which it downloads unless the package
flashinfer-cubin is installed; those of the other are compiled by nvidia-cutlass-dsl. Both take the
two parts of a query as one row. They never ran: what is tested is the translation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from torch_hybrid.ops.flashinfer.blackwell import workspace
from torch_hybrid.ops.latent_attention._triton_store import store_rows
from torch_hybrid.ops.triton.padding import set_padding

_NOPE_DIMS = {512: 128, 256: 64}  # of the expanded heads of the models that have these ranks


def _attend(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    pool: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    scale: float,
    planned: Sequence[Tensor],
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``torch_hybrid::latent_attention_with_lse``, and of the op without."""
    from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla

    key_lens, tiled_table, _ = planned
    rank, rope_dim = q_latent.shape[2], q_rope.shape[2]
    out = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    lse = q_latent.new_empty(out.shape[:2], dtype=torch.float32)
    if out.shape[0] == 0:
        return out, lse
    store_rows(latent, k_rope, pool, slot_mapping, cu_seqlens)
    trtllm_batch_decode_with_kv_cache_mla(
        query=torch.cat([q_latent, q_rope], dim=2).unsqueeze(1),
        kv_cache=pool,
        workspace_buffer=workspace(pool.device),
        qk_nope_head_dim=_NOPE_DIMS[rank],
        kv_lora_rank=rank,
        qk_rope_head_dim=rope_dim,
        block_tables=tiled_table,
        seq_lens=key_lens,
        max_seq_len=page_table.shape[1] * pool.shape[1],
        out=out.unsqueeze(1),
        bmm1_scale=scale,
        bmm2_scale=1.0,
        backend=backend,
        lse=lse,
        return_lse=True,
        return_lse_base="basee",
    )
    set_padding(out, lse, cu_seqlens)
    return out, lse


by_trtllm = partial(_attend, backend="trtllm-gen")
by_cute_dsl = partial(_attend, backend="cute-dsl")
