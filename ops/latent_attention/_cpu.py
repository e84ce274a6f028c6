"""Implementation "cpp": the C++ kernels of _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.formats.fp8_kv import rounded, worth
from torch_hybrid.ops.latent_attention.op import GatherLatents, LatentAttention, StoreLatents
from torch_hybrid.ops.native.call import kernel

_SOURCE = Path(__file__).with_name("_cpu.cpp")
_STORE = kernel(
    "store_latents",
    _SOURCE,
    tensors="latent k_rope pool slot_mapping cu_seqlens",
    integers="row_bytes page_size num_slots "
    "latent_stride latent_bytes k_rope_stride k_rope_bytes max_tokens num_seqs num_threads",
)
_GATHER = kernel(
    "gather_latents",
    _SOURCE,
    tensors="pool rows out",
    integers="row_bytes page_size num_slots num_rows num_threads",
)


latent_attention = cpp_launcher(
    LatentAttention,
    _SOURCE,
    tensors="cu_seqlens seq_lens page_table slot_mapping pool_scale "
    "q_latent q_rope latent k_rope pool out",
    sizes="T=num_tokens N=num_seqs P=num_pages page_size M=max_pages H=num_heads rank rope_dim",
    integers="page_table_row num_tokens num_seqs num_pages page_size max_pages "
    "q_latent_token q_latent_head q_rope_token q_rope_head latent_token k_rope_token "
    "num_heads rank rope_dim is_bf16 is_invariant num_threads",
    numbers="scale",
    out="q_latent",
)


def store_latents(x: StoreLatents) -> None:
    """Launch ``torch_hybrid::store_latents``."""
    latent, k_rope, pool, slot_mapping, cu_seqlens = (
        x.latent,
        x.k_rope,
        x.pool,
        x.slot_mapping,
        x.cu_seqlens,
    )
    if x.pool_scale is not None:
        latent, k_rope = rounded(latent, x.pool_scale), rounded(k_rope, x.pool_scale)
    num_pages, page_size, width = pool.shape
    item = latent.element_size()
    in_range = _STORE(
        latent,
        k_rope,
        pool,
        slot_mapping,
        cu_seqlens,
        width * item,
        page_size,
        num_pages * page_size,
        latent.stride(0) * item,
        latent.shape[1] * item,
        k_rope.stride(0) * item,
        k_rope.shape[1] * item,
        slot_mapping.shape[0],
        cu_seqlens.shape[0] - 1,
        torch.get_num_threads(),
    )
    if not in_range:
        x.check_indices()


def gather_latents(x: GatherLatents) -> Tensor:
    """Launch ``torch_hybrid::gather_latents``."""
    pool, rows, pool_scale = x.pool, x.rows, x.pool_scale
    num_pages, page_size, width = pool.shape
    num_rows = rows.shape[0]
    out = pool.new_empty(num_rows, width)
    in_range = _GATHER(
        pool,
        rows,
        out,
        width * pool.element_size(),
        page_size,
        num_pages * page_size,
        num_rows,
        torch.get_num_threads(),
    )
    if not in_range:
        x.check_indices()
    return out if pool_scale is None else worth(out, pool_scale, x.dtype or torch.float32)
