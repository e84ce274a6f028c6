"""Attention over paged latents: declarations of the ops, and the list of implementations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from torch_hybrid.ops.core.autograd import define_made_of
from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64, Implementation
from torch_hybrid.ops.core.declare import (
    NOTHING,
    Cpp,
    Dense,
    Index,
    Op,
    Pool,
    Rows,
    define,
    like,
    made,
)
from torch_hybrid.ops.core.page_bounds import PagedOp
from torch_hybrid.ops.core.registration import check_dtypes, check_scale
from torch_hybrid.ops.formats import fp8_kv
from torch_hybrid.ops.implementations import in_cpp, in_torch, in_triton, invariant

_PACKAGE = "torch_hybrid.ops.latent_attention"
EXTEND = frozenset({"extend"})  # queries of more than one token of a sequence
_OWN_FEATURES = EXTEND | {fp8_kv.FEATURE}
_FP8 = frozenset({fp8_kv.FEATURE})
_DTYPES_OF_POOLS = FLOATS_AND_FLOAT64 | {fp8_kv.DTYPE}


def _attention(function: str) -> dict[str, Implementation]:
    cpp = in_cpp(
        f"{_PACKAGE}._cpu.cpp:{function}",
        multiples={"rank": 16, "rope_dim": 16},
        features=_OWN_FEATURES,
    )
    triton = in_triton(
        f"{_PACKAGE}._triton:{function}",
        limits={"rank": 512, "rope_dim": 64},
        features=_OWN_FEATURES,
    )
    return {
        "cpp": cpp,
        "cpp_invariant": invariant(cpp),
        "triton": triton,
        "triton_invariant": invariant(triton),
        "torch": in_torch(
            f"{_PACKAGE}._torch:{function}", dtypes=FLOATS_AND_FLOAT64, features=_OWN_FEATURES
        ),
    }


def _rows(function: str) -> dict[str, Implementation]:
    return {
        "cpp": in_cpp(f"{_PACKAGE}._cpu:{function}", dtypes=_DTYPES_OF_POOLS, features=_FP8),
        "torch": in_torch(
            f"{_PACKAGE}._rows:{function}",
            dtypes=_DTYPES_OF_POOLS,
            features=_FP8,
            cuda_graph=True,
        ),
    }


IMPLEMENTATIONS = _attention("latent_attention")
STORE_IMPLEMENTATIONS = _rows("store_latents")
GATHER_IMPLEMENTATIONS = _rows("gather_latents")


@dataclass(slots=True, repr=False, eq=False)
class LatentAttention(PagedOp):
    """Causal attention to pages, absorbed, after the new latents are written into them.

    Multi-head latent attention (DeepSeek-V2) with the key projection absorbed into the query and
    the value projection left to the caller: all heads share one row ``[latent | k_rope]`` per
    token, of which ``latent`` is the value too. One call serves any mix of lengths: N sequences,
    their T new tokens packed, H heads. Query i of a sequence with n new tokens sees the rows up
    to position ``seq_len - n + i``. Page 0 is null: it is neither read nor written. Tokens from
    ``cu_seqlens[N]`` on are padding.

    Args:
        q_latent: [T, H, R], ``q_nope W_UK``; float32, bfloat16 or float16; any strides that keep
            R contiguous.
        q_rope: [T, H, P], as q_latent; rotated, or not in a model without positions.
        latent: [T, R], the normalised latent of the new tokens, which may be a slice.
        k_rope: [T, P], the part of the key that the heads share, which may be a slice.
        pool: [pages, page_size, R + P], dtype of q_latent or float8_e4m3fn, contiguous. Mutated:
            the rows that ``slot_mapping`` names, rounded to FP8 as ``ops.fp8_kv`` says; the new
            tokens attend to what was rounded.
        scale: factor of the logits: that of the expanded head, ``(nope + P) ** -0.5``, and never
            ``(R + P) ** -0.5``.
        pool_scale: [1] float32, positive: what a number of float8_e4m3fn is worth. For a pool of 8
            bits alone.

    Returns:
        [T, H, R] in the dtype of q_latent: latents averaged by the softmax, to be multiplied by
        ``W_UV``. Rows of padding tokens are 0.
    """

    q_latent: Annotated[Tensor, Rows("H", "rank", last_dim=True)]
    q_rope: Annotated[Tensor, Rows("H", "rope_dim", last_dim=True)]
    latent: Annotated[Tensor, Rows("rank", last_dim=True)]
    k_rope: Annotated[Tensor, Rows("rope_dim", last_dim=True)]
    pool: Annotated[Tensor, Pool("page_size", "rank + rope_dim", size="P", dtype="any")]
    cu_seqlens: Annotated[Tensor, Index("N + 1")]
    seq_lens: Annotated[Tensor, Index("N")]
    page_table: Annotated[Tensor, Index("N", "M", counts=True, last_dim=True)]
    slot_mapping: Annotated[Tensor, Index("T")]
    scale: float = field(kw_only=True)
    pool_scale: Annotated[Tensor | None, Dense("1", dtype=torch.float32)] = field(
        default=None, kw_only=True
    )
    planned: Sequence[Tensor] | None = field(default=(), kw_only=True)

    def stored(self) -> StoreLatents:
        """Return the call that writes the new latents alone."""
        rows = (self.latent, self.k_rope, self.pool, self.slot_mapping, self.cu_seqlens)
        return StoreLatents(*rows, pool_scale=self.pool_scale, impl=self.impl)

    def features(self) -> frozenset[str]:
        """List what not all implementations have: FP8 latents."""
        return fp8_kv.features_of(self.pool.dtype)

    def check(self) -> None:
        """Raise ValueError unless the pool fits the latents, and the scale is positive."""
        fp8_kv.check_pool_dtype("pool", self.pool, self.q_latent.dtype)
        fp8_kv.check_pairs(self.pool, rank=self.q_latent.shape[2], rope_dim=self.q_rope.shape[2])
        fp8_kv.check_scales("pool_scale", self.pool, self.pool_scale, 1)
        check_scale(self.scale)

    def check_indices(self) -> None:
        """Raise ValueError unless every index that a call uses is inside its pool."""
        self.check_pages(num_pages=self.pool.shape[0], page_size=self.pool.shape[1])


@dataclass(slots=True, repr=False, eq=False)
class StoreLatents(Op):
    """New latents written into their pages, for attention that does not go through the pages.

    Args:
        latent: [T, R], the normalised latent, which may be a slice of a wider tensor.
        k_rope: [T, P], in the dtype of latent, which may be a slice.
        pool: [pages, page_size, R + P], dtype of latent or float8_e4m3fn, contiguous. Mutated: the
            rows that ``slot_mapping`` names.
        slot_mapping: [T] int32, ``page * page_size + offset`` of each new token.
        cu_seqlens: [N + 1] int32; tokens from ``cu_seqlens[N]`` on are padding, and not written.
        pool_scale: as of :func:`latent_attention`.
    """

    latent: Annotated[Tensor, Rows("rank", dtype="any", last_dim=True)]
    k_rope: Annotated[Tensor, Rows("rope_dim", dtype="any", last_dim=True)]
    pool: Annotated[Tensor, Pool("page_size", "rank + rope_dim", size="P")]
    slot_mapping: Annotated[Tensor, Index("T")]
    cu_seqlens: Annotated[Tensor, Index("num_offsets", counts=True)]
    pool_scale: Annotated[Tensor | None, Dense("1", dtype=torch.float32)] = field(
        default=None, kw_only=True
    )

    def check(self) -> None:
        """Raise ValueError unless the pool is of the latents' dtype, or FP8 and has a scale."""
        dtype = self.latent.dtype if self.pool.dtype == fp8_kv.DTYPE else self.pool.dtype
        check_dtypes({"latent": (self.latent, dtype), "k_rope": (self.k_rope, dtype)})
        fp8_kv.check_scales("pool_scale", self.pool, self.pool_scale, 1)

    def check_indices(self) -> None:
        """Raise ValueError unless each token has a slot, outside the null page."""
        slots, num_tokens = self.slot_mapping, int(self.cu_seqlens[-1])
        if not 0 <= num_tokens <= slots.shape[0]:
            raise ValueError(f"cu_seqlens must end within [0, {slots.shape[0]}], got {num_tokens}")
        _check_slots("slot_mapping", slots[:num_tokens].tolist(), self.pool)


@dataclass(slots=True, repr=False, eq=False)
class GatherLatents(Op):
    """Rows of the pool copied into one packed tensor, such as a chunk of prefixes to expand.

    Args:
        pool: [pages, page_size, R + P], contiguous.
        rows: [Tk] int32, ``page * page_size + offset``; 0 is padding and stands for zeros.
        pool_scale: as of :func:`latent_attention`.
        dtype: of what FP8 rows are worth; for an FP8 pool alone.

    Returns:
        [Tk, R + P] in the dtype of pool, or ``dtype``.
    """

    pool: Annotated[Tensor, Dense("P", "page_size", "width")]
    rows: Annotated[Tensor, Index("T", counts=True)]
    pool_scale: Annotated[Tensor | None, Dense("1", dtype=torch.float32)] = field(
        default=None, kw_only=True
    )
    dtype: torch.dtype | None = field(default=None, kw_only=True)

    def check(self) -> None:
        """Raise ValueError unless scale and dtype are given for an FP8 pool, and for no other."""
        fp8_kv.check_scales("pool_scale", self.pool, self.pool_scale, 1)
        if (self.dtype is None) == (self.pool.dtype == fp8_kv.DTYPE):
            wanted = "must be given" if self.dtype is None else "must be None"
            raise ValueError(f"dtype {wanted} for a pool of {self.pool.dtype}")

    def check_indices(self) -> None:
        """Raise ValueError unless each row is 0 or in the pool, outside the null page."""
        _check_slots("rows", [row for row in self.rows.tolist() if row], self.pool)


def _check_slots(name: str, slots: list[int], pool: Tensor) -> None:
    num_pages, page_size, _ = pool.shape
    for slot in slots:
        if not page_size <= slot < num_pages * page_size:
            raise ValueError(
                f"{name} must be in [{page_size}, {num_pages * page_size}), got {slot}"
            )


def made_of_stored(rows: Tensor, stored: Sequence[Tensor]) -> Tensor:
    """Tell autograd that gathered rows are made of latents that were stored.

    A pool has no history: without this, a backward that ends at the pool would pass as complete.

    Args:
        rows: [Tk, R + P], from ``gather_latents``.
        stored: what ``store_latents`` wrote into the pool before.

    Returns:
        ``rows``; a copy where autograd follows what was stored, through which no backward goes.
    """
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in stored)):
        return rows
    out: Tensor = torch.ops.torch_hybrid.store_latents.made_of(rows, stored)
    return out


def _empty_rows(x: GatherLatents) -> Tensor:
    return x.pool.new_empty(x.rows.shape[0], x.pool.shape[2], dtype=x.dtype or x.pool.dtype)


latent_attention = define(
    LatentAttention,
    IMPLEMENTATIONS,
    cpp=Cpp("page_size H=num_heads rank rope_dim"),
    returns=like("q_latent"),
    limited={"num_heads": "H", "rank": "rank", "rope_dim": "rope_dim", "page_size": "page_size"},
    names_ndim=True,
    flops="2 * T * H * M * page_size * (2 * rank + rope_dim)",  # values are latents
)
define_made_of("store_latents.made_of")
_CPP_SIZES = "page_size P*page_size=num_slots"
_ROW_BYTES = {"row_bytes": "x.pool.shape[2] * x.pool.element_size()"}
store_latents = define(
    StoreLatents,
    STORE_IMPLEMENTATIONS,
    returns=NOTHING,
    floats=_DTYPES_OF_POOLS,
    names_ndim=True,
    cpp=Cpp(
        f"{_CPP_SIZES} T=max_tokens num_offsets-1=num_seqs",
        {
            **_ROW_BYTES,
            "latent_stride": "x.latent.stride(0) * x.pool.element_size()",
            "latent_bytes": "x.latent.shape[1] * x.pool.element_size()",
            "k_rope_stride": "x.k_rope.stride(0) * x.pool.element_size()",
            "k_rope_bytes": "x.k_rope.shape[1] * x.pool.element_size()",
        },
    ),
)
gather_latents = define(
    GatherLatents,
    GATHER_IMPLEMENTATIONS,
    returns=made(_empty_rows),
    floats=_DTYPES_OF_POOLS,
    names_ndim=True,
    cpp=Cpp(f"{_CPP_SIZES} T=num_rows", _ROW_BYTES),
)
