"""Implementation "cpp": the C++ kernels of _cpu.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.core.page_bounds import check_page_indices
from torch_hybrid.ops.formats.fp8_kv import rounded, worth
from torch_hybrid.ops.latent_attention.validate import check_gathered_slots, check_new_slots
from torch_hybrid.ops.native.call import kernel

_SOURCE = Path(__file__).with_name("_cpu.cpp")
_ATTEND = kernel(
    "latent_attention",
    _SOURCE,
    tensors="cu_seqlens seq_lens page_table slot_mapping pool_scale "
    "q_latent q_rope latent k_rope pool out lse",
    integers="page_table_row num_tokens num_seqs num_pages page_size max_pages "
    "q_latent_token q_latent_head q_rope_token q_rope_head latent_token k_rope_token "
    "num_heads rank rope_dim is_bf16 is_invariant num_threads",
    numbers="scale",
)
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


def latent_attention_with_lse(
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
    pool_scale: Tensor | None = None,
    is_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Launcher of ``torch_hybrid::latent_attention_with_lse``, and of the op without."""
    num_tokens, num_heads, rank = q_latent.shape
    num_pages, page_size, _ = pool.shape
    out = q_latent.new_empty(q_latent.shape)
    lse = q_latent.new_empty(q_latent.shape[:2], dtype=torch.float32)
    in_range = _ATTEND(
        cu_seqlens,
        seq_lens,
        page_table,
        slot_mapping,
        pool_scale,
        q_latent,
        q_rope,
        latent,
        k_rope,
        pool,
        out,
        lse,
        page_table.stride(0),
        num_tokens,
        seq_lens.shape[0],
        num_pages,
        page_size,
        page_table.shape[1],
        q_latent.stride(0),
        q_latent.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        latent.stride(0),
        k_rope.stride(0),
        num_heads,
        rank,
        q_rope.shape[2],
        q_latent.dtype is torch.bfloat16,
        is_invariant,
        torch.get_num_threads(),
        scale,
    )
    if not in_range:
        index = (cu_seqlens, seq_lens, page_table, slot_mapping)
        check_page_indices(*index, num_pages=num_pages, page_size=page_size)
    return out, lse


def store_latents(
    latent: Tensor,
    k_rope: Tensor,
    pool: Tensor,
    slot_mapping: Tensor,
    cu_seqlens: Tensor,
    *,
    pool_scale: Tensor | None = None,
) -> None:
    """Launcher of ``torch_hybrid::store_latents``."""
    if pool_scale is not None:
        latent, k_rope = rounded(latent, pool_scale), rounded(k_rope, pool_scale)
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
        check_new_slots(slot_mapping, cu_seqlens, pool)


def gather_latents(
    pool: Tensor,
    rows: Tensor,
    *,
    pool_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Launcher of ``torch_hybrid::gather_latents``."""
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
        check_gathered_slots(rows, pool)
    return out if pool_scale is None else worth(out, pool_scale, dtype or torch.float32)
