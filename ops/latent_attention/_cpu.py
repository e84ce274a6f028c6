"""Implementation "cpp": the C++ kernels of _cpu.cpp."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.core.declare import cpp_launcher
from torch_hybrid.ops.formats.fp8_kv import rounded, worth
from torch_hybrid.ops.latent_attention.op import GatherLatents, LatentAttention, StoreLatents

_SOURCE = Path(__file__).with_name("_cpu.cpp")
_store = cpp_launcher(
    StoreLatents,
    _SOURCE,
    tensors="latent k_rope pool slot_mapping cu_seqlens",
    sizes="page_size P*page_size=num_slots T=max_tokens num_offsets-1=num_seqs",
    integers="row_bytes page_size num_slots "
    "latent_stride latent_bytes k_rope_stride k_rope_bytes max_tokens num_seqs num_threads",
    values={
        "row_bytes": "x.pool.shape[2] * x.pool.element_size()",
        "latent_stride": "x.latent.stride(0) * x.pool.element_size()",
        "latent_bytes": "x.latent.shape[1] * x.pool.element_size()",
        "k_rope_stride": "x.k_rope.stride(0) * x.pool.element_size()",
        "k_rope_bytes": "x.k_rope.shape[1] * x.pool.element_size()",
    },
    out="",
)
_gather = cpp_launcher(
    GatherLatents,
    _SOURCE,
    tensors="pool rows out",
    sizes="page_size P*page_size=num_slots T=num_rows",
    integers="row_bytes page_size num_slots num_rows num_threads",
    values={"row_bytes": "x.pool.shape[2] * x.pool.element_size()"},
    out=lambda x: x.pool.new_empty(x.rows.shape[0], x.pool.shape[2]),
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
    if x.pool_scale is not None:
        latent, k_rope = rounded(x.latent, x.pool_scale), rounded(x.k_rope, x.pool_scale)
        x = replace(x, latent=latent, k_rope=k_rope)
    _store(x)


def gather_latents(x: GatherLatents) -> Tensor:
    """Launch ``torch_hybrid::gather_latents``."""
    held: Tensor = _gather(x)
    return held if x.pool_scale is None else worth(held, x.pool_scale, x.dtype or torch.float32)
