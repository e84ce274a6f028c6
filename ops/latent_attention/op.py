"""Attention over paged latents: public functions, schemas and the list of implementations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torch_hybrid.ops.core.autograd import define_made_of
from torch_hybrid.ops.core.capability import (
    BATCH_INVARIANT,
    FLOATS_AND_FLOAT64,
    Capability,
    Implementation,
)
from torch_hybrid.ops.core.registration import (
    check_impl,
    check_planned,
    check_scale,
    define_op,
    given,
)
from torch_hybrid.ops.flashinfer.library import HOPPER, flashinfer_missing, with_flashinfer
from torch_hybrid.ops.formats import fp8_kv
from torch_hybrid.ops.latent_attention.validate import check_attention, check_gather, check_store
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

_PACKAGE = "torch_hybrid.ops.latent_attention"
EXTEND = frozenset({"extend"})  # queries of more than one token of a sequence
_OWN_FEATURES = EXTEND | {fp8_kv.FEATURE}
_FP8 = frozenset({fp8_kv.FEATURE})
_CPU, _CPU_AND_CUDA = frozenset({"cpu"}), frozenset({"cpu", "cuda"})


def _attention(function: str) -> dict[str, Implementation]:
    cpp = Capability(
        devices=_CPU,
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        multiples={"rank": 16, "rope_dim": 16},
        features=_OWN_FEATURES,
        available=compiler_missing,
    )
    triton = Capability(
        devices=triton_devices(),
        limits={"rank": 512, "rope_dim": 64},
        features=_OWN_FEATURES,
        cuda_graph=True,
        available=triton_missing,
    )
    plain = Capability(devices=_CPU_AND_CUDA, dtypes=FLOATS_AND_FLOAT64, features=_OWN_FEATURES)
    own = {
        "cpp": Implementation(capability=cpp, launcher=f"{_PACKAGE}._cpu:{function}"),
        "cpp_invariant": Implementation(
            capability=replace(cpp, features=cpp.features | {BATCH_INVARIANT}),
            launcher=f"{_PACKAGE}._cpu:{function}",
            options={"is_invariant": True},
        ),
        "triton": Implementation(capability=triton, launcher=f"{_PACKAGE}._triton:{function}"),
        "triton_invariant": Implementation(
            capability=replace(triton, features=triton.features | {BATCH_INVARIANT}),
            launcher=f"{_PACKAGE}._triton:{function}",
            options={"is_invariant": True},
        ),
        "torch": Implementation(capability=plain, launcher=f"{_PACKAGE}._torch:{function}"),
    }
    flashinfer = Capability(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        one_of={"rank": (128, 256, 512), "rope_dim": (64,)},
        cuda_graph=True,
        available=flashinfer_missing(capabilities=HOPPER),
    )
    return with_flashinfer(
        "latent_attention",
        own,
        Implementation(
            capability=flashinfer,
            launcher=f"{_PACKAGE}._flashinfer:{function}",
            planner=f"{_PACKAGE}._flashinfer:plan",
        ),
    )


def _sizes(q_latent: Tensor, q_rope: Tensor, pool: Tensor) -> dict[str, int]:
    """Those that an implementation may limit."""
    _, num_heads, rank = q_latent.shape
    sizes = {"num_heads": num_heads, "rank": rank, "rope_dim": q_rope.shape[2]}
    return {**sizes, "page_size": pool.shape[1]}


def _rows(function: str) -> dict[str, Implementation]:
    cpp = Capability(devices=_CPU, features=_FP8, available=compiler_missing)
    plain = Capability(devices=_CPU_AND_CUDA, features=_FP8, cuda_graph=True)
    return {
        "cpp": Implementation(capability=cpp, launcher=f"{_PACKAGE}._cpu:{function}"),
        "torch": Implementation(capability=plain, launcher=f"{_PACKAGE}._rows:{function}"),
    }


IMPLEMENTATIONS = _attention("latent_attention_with_lse")
STORE_IMPLEMENTATIONS = _rows("store_latents")
GATHER_IMPLEMENTATIONS = _rows("gather_latents")


def latent_attention(
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
    planned: Sequence[Tensor] = (),
    impl: str,
) -> Tensor:
    """Write the new latents into their pages, then attend causally to the pages, absorbed.

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
            the rows that ``slot_mapping`` names, rounded to 8 bits as ``ops.fp8_kv`` says; the new
            tokens attend to what was rounded.
        cu_seqlens: [N + 1] int32, offsets of each sequence's new tokens, from 0.
        seq_lens: [N] int32, total length of each sequence, new tokens included.
        page_table: [N, max_pages] int32; entry j holds positions ``[j * page_size, (j + 1) *
            page_size)``. Entries that no query sees are never read.
        slot_mapping: [T] int32, ``page * page_size + offset`` of each new token.
        scale: factor of the logits: that of the expanded head, ``(nope + P) ** -0.5``, and never
            ``(R + P) ** -0.5``.
        pool_scale: [1] float32, positive: what a number of float8_e4m3fn is worth. For a pool of 8
            bits alone.
        planned: for an implementation that plans, what its planner made for these lengths: its
            tensors, and its values as a tensor on the host.
        impl: name in IMPLEMENTATIONS.

    Returns:
        [T, H, R] in the dtype of q_latent: latents averaged by the softmax, to be multiplied by
        ``W_UV``. Rows of padding tokens are 0.

    Raises:
        ValueError: a shape, dtype or option is wrong, or, where reading it is free (on a CPU),
            an index is outside its pool.
    """
    index = (cu_seqlens, seq_lens, page_table, slot_mapping)
    check_attention(q_latent, q_rope, latent, k_rope, pool, *index, pool_scale)
    check_scale(scale)
    sizes, features = _sizes(q_latent, q_rope, pool), fp8_kv.features_of(pool.dtype) or None
    check_impl(impl, IMPLEMENTATIONS, q_latent.device, sizes, features=features)
    check_planned(impl, IMPLEMENTATIONS, planned)
    out: Tensor = _LATENT_ATTENTION(
        q_latent,
        q_rope,
        latent,
        k_rope,
        pool,
        *index,
        scale=scale,
        impl=impl,
        **fp8_kv.given_scales("pool_scale", pool_scale),
        **given(planned),
    )
    return out


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
    planned: Sequence[Tensor] = (),
    impl: str,
) -> tuple[Tensor, Tensor]:
    """:func:`latent_attention` that also returns the log-sum-exp of each row's logits.

    Returns:
        The output, [T, H, R] in the dtype of q_latent, and the natural-log LSE, [T, H] float32;
        padding rows hold ``(0, -inf)``, the identity of ``merge_states``.
    """
    index = (cu_seqlens, seq_lens, page_table, slot_mapping)
    check_attention(q_latent, q_rope, latent, k_rope, pool, *index, pool_scale)
    check_scale(scale)
    sizes, features = _sizes(q_latent, q_rope, pool), fp8_kv.features_of(pool.dtype) or None
    check_impl(impl, IMPLEMENTATIONS, q_latent.device, sizes, features=features)
    check_planned(impl, IMPLEMENTATIONS, planned)
    out, lse = _LATENT_ATTENTION_WITH_LSE(
        q_latent,
        q_rope,
        latent,
        k_rope,
        pool,
        *index,
        scale=scale,
        impl=impl,
        **fp8_kv.given_scales("pool_scale", pool_scale),
        **given(planned),
    )
    return out, lse


def store_latents(
    latent: Tensor,
    k_rope: Tensor,
    pool: Tensor,
    slot_mapping: Tensor,
    cu_seqlens: Tensor,
    *,
    pool_scale: Tensor | None = None,
    impl: str,
) -> None:
    """Write new latents into their pages, for attention that does not go through the pages.

    Args:
        latent: [T, R], the normalised latent, which may be a slice of a wider tensor.
        k_rope: [T, P], in the dtype of latent, which may be a slice.
        pool: [pages, page_size, R + P], dtype of latent or float8_e4m3fn, contiguous. Mutated: the
            rows that ``slot_mapping`` names.
        slot_mapping: [T] int32, ``page * page_size + offset`` of each new token.
        cu_seqlens: [N + 1] int32; tokens from ``cu_seqlens[N]`` on are padding, and not written.
        pool_scale: as of :func:`latent_attention`.
        impl: name in STORE_IMPLEMENTATIONS.

    Raises:
        ValueError: a shape, dtype or option is wrong, or, on a CPU, an index is out of range.
    """
    check_store(latent, k_rope, pool, slot_mapping, cu_seqlens, pool_scale)
    check_impl(impl, STORE_IMPLEMENTATIONS, latent.device)
    scale = fp8_kv.given_scales("pool_scale", pool_scale)
    _STORE_LATENTS(latent, k_rope, pool, slot_mapping, cu_seqlens, impl=impl, **scale)


def gather_latents(
    pool: Tensor,
    rows: Tensor,
    *,
    pool_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    impl: str,
) -> Tensor:
    """Copy rows of the pool into one packed tensor, such as a chunk of prefixes to expand.

    Args:
        pool: [pages, page_size, R + P], contiguous.
        rows: [Tk] int32, ``page * page_size + offset``; 0 is padding and stands for zeros.
        pool_scale: as of :func:`latent_attention`.
        dtype: of what rows of 8 bits are worth; for a pool of 8 bits alone.
        impl: name in GATHER_IMPLEMENTATIONS.

    Returns:
        [Tk, R + P] in the dtype of pool, or ``dtype``.

    Raises:
        ValueError: a shape, dtype or option is wrong, or, on a CPU, an index is out of range.
    """
    check_gather(pool, rows, pool_scale, dtype)
    check_impl(impl, GATHER_IMPLEMENTATIONS, pool.device)
    if pool_scale is None:
        out: Tensor = _GATHER_LATENTS(pool, rows, impl=impl)
    else:
        out = _GATHER_LATENTS(pool, rows, impl=impl, pool_scale=pool_scale, dtype=dtype)
    return out


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


def _fake_with_lse(
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
    impl: str,
    pool_scale: Tensor | None = None,
    planned: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    lse = q_latent.new_empty(q_latent.shape[:2], dtype=torch.float32)
    return q_latent.new_empty(q_latent.shape), lse


def _fake_gather(
    pool: Tensor,
    rows: Tensor,
    *,
    impl: str,
    pool_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return pool.new_empty(rows.shape[0], pool.shape[2], dtype=dtype or pool.dtype)


_ARGUMENTS = (
    "(Tensor q_latent, Tensor q_rope, Tensor latent, Tensor k_rope, Tensor(a!) pool,"
    " Tensor cu_seqlens, Tensor seq_lens, Tensor page_table, Tensor slot_mapping, *,"
    " float scale, str impl, Tensor? pool_scale=None, Tensor[]? planned=None)"
)
_LATENT_ATTENTION = define_op(
    f"latent_attention{_ARGUMENTS} -> Tensor", like=["q_latent"], implementations=IMPLEMENTATIONS
)
_LATENT_ATTENTION_WITH_LSE = define_op(
    f"latent_attention_with_lse{_ARGUMENTS} -> (Tensor, Tensor)",
    fake=_fake_with_lse,
    implementations=IMPLEMENTATIONS,
)
define_made_of("store_latents.made_of")
_STORE_LATENTS = define_op(
    "store_latents(Tensor latent, Tensor k_rope, Tensor(a!) pool, Tensor slot_mapping,"
    " Tensor cu_seqlens, *, str impl, Tensor? pool_scale=None) -> ()",
    implementations=STORE_IMPLEMENTATIONS,
)
_GATHER_LATENTS = define_op(
    "gather_latents(Tensor pool, Tensor rows, *, str impl, Tensor? pool_scale=None,"
    " ScalarType? dtype=None) -> Tensor",
    fake=_fake_gather,
    implementations=GATHER_IMPLEMENTATIONS,
)
