"""What the ops of this family ask of their arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS
from torch_hybrid.ops.core.registration import check_contiguous, check_dtypes, check_shapes
from torch_hybrid.ops.formats import fp8_kv


def check_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    pool: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    pool_scale: Tensor | None,
) -> None:
    """Raise ValueError naming the first argument of latent_attention that is wrong."""
    for name, tensor, dim in (("q_latent", q_latent, 3), ("q_rope", q_rope, 3)):
        _check_dim(name, tensor, dim)
    _check_dim("page_table", page_table, 2)
    num_tokens, num_heads, rank = q_latent.shape
    rope_dim = q_rope.shape[2]
    num_seqs = page_table.shape[0]
    check_shapes(
        {
            "q_rope": (q_rope, (num_tokens, num_heads, rope_dim)),
            "latent": (latent, (num_tokens, rank)),
            "k_rope": (k_rope, (num_tokens, rope_dim)),
            "cu_seqlens": (cu_seqlens, (num_seqs + 1,)),
            "seq_lens": (seq_lens, (num_seqs,)),
        }
    )
    check_dtypes(
        {
            "q_rope": (q_rope, q_latent.dtype),
            "latent": (latent, q_latent.dtype),
            "seq_lens": (seq_lens, torch.int32),
            "page_table": (page_table, torch.int32),
        }
    )
    fp8_kv.check_pool_dtype("pool", pool, q_latent.dtype)
    fp8_kv.check_pairs(pool, rank=rank, rope_dim=rope_dim)
    check_contiguous(seq_lens=seq_lens)
    for name, tensor in (("q_latent", q_latent), ("q_rope", q_rope), ("page_table", page_table)):
        _check_contiguous_rows(name, tensor)
    check_store(latent, k_rope, pool, slot_mapping, cu_seqlens, pool_scale)


def check_store(
    latent: Tensor,
    k_rope: Tensor,
    pool: Tensor,
    slot_mapping: Tensor,
    cu_seqlens: Tensor,
    pool_scale: Tensor | None,
) -> None:
    """Raise ValueError naming the first argument of store_latents that is wrong."""
    for name, tensor, dim in (("latent", latent, 2), ("k_rope", k_rope, 2), ("pool", pool, 3)):
        _check_dim(name, tensor, dim)
    num_tokens, rank = latent.shape
    rope_dim = k_rope.shape[1]
    check_shapes(
        {
            "k_rope": (k_rope, (num_tokens, rope_dim)),
            "pool": (pool, (*pool.shape[:2], rank + rope_dim)),
            "slot_mapping": (slot_mapping, (num_tokens,)),
        }
    )
    _check_pool(pool, pool_scale)
    dtype = latent.dtype if pool.dtype == fp8_kv.DTYPE else pool.dtype
    check_dtypes(
        {
            "latent": (latent, dtype),
            "k_rope": (k_rope, dtype),
            "slot_mapping": (slot_mapping, torch.int32),
            "cu_seqlens": (cu_seqlens, torch.int32),
        }
    )
    check_contiguous(slot_mapping=slot_mapping, cu_seqlens=cu_seqlens)
    for name, tensor in (("latent", latent), ("k_rope", k_rope)):
        _check_contiguous_rows(name, tensor)


def check_gather(
    pool: Tensor, rows: Tensor, pool_scale: Tensor | None, dtype: torch.dtype | None
) -> None:
    """Raise ValueError naming the first argument of gather_latents that is wrong."""
    _check_dim("pool", pool, 3)
    _check_dim("rows", rows, 1)
    _check_pool(pool, pool_scale)
    if (dtype is None) == (pool.dtype == fp8_kv.DTYPE):
        wanted = "must be given" if dtype is None else "must be None"
        raise ValueError(f"dtype {wanted} for a pool of {pool.dtype}")
    check_dtypes({"rows": (rows, torch.int32)})
    check_contiguous(rows=rows)


def check_new_slots(slot_mapping: Tensor, cu_seqlens: Tensor, pool: Tensor) -> None:
    """Raise ValueError unless each token has a slot, outside the null page."""
    num_tokens = int(cu_seqlens[-1])
    if not 0 <= num_tokens <= slot_mapping.shape[0]:
        raise ValueError(
            f"cu_seqlens must end within [0, {slot_mapping.shape[0]}], got {num_tokens}"
        )
    _check_slots("slot_mapping", slot_mapping[:num_tokens].tolist(), pool)


def check_gathered_slots(rows: Tensor, pool: Tensor) -> None:
    """Raise ValueError unless each row is 0 or in the pool, outside the null page."""
    _check_slots("rows", [row for row in rows.tolist() if row], pool)


def _check_slots(name: str, slots: list[int], pool: Tensor) -> None:
    num_pages, page_size, _ = pool.shape
    for slot in slots:
        if not page_size <= slot < num_pages * page_size:
            raise ValueError(
                f"{name} must be in [{page_size}, {num_pages * page_size}), got {slot}"
            )


def _check_dim(name: str, tensor: Tensor, dim: int) -> None:
    if tensor.dim() != dim:
        raise ValueError(f"{name} must have {dim} dimensions, got {tensor.dim()}")


def _check_pool(pool: Tensor, pool_scale: Tensor | None) -> None:
    if pool.dtype not in FLOATS | {torch.float64, fp8_kv.DTYPE}:
        raise ValueError(f"pool must be a floating point tensor, got {pool.dtype}")
    if not pool.is_contiguous():
        raise ValueError(f"pool must be contiguous, got strides {pool.stride()}")
    fp8_kv.check_scales("pool_scale", pool, pool_scale, 1)


def _check_contiguous_rows(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1:
        raise ValueError(f"{name} must have a contiguous last dim, got {tensor.stride()}")
