"""block_attention: public function, validation, schema and the list of implementations."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import (
    BATCH_INVARIANT,
    FLOATS_AND_FLOAT64,
    Capability,
    Implementation,
)
from torch_hybrid.ops.core.registration import (
    check_contiguous,
    check_dtypes,
    check_impl,
    check_scale,
    check_shapes,
    define_op,
)
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

_PACKAGE = "torch_hybrid.ops.block_attention"

_TRITON_CAPABILITY = Capability(
    devices=triton_devices(),
    limits={"head_dim": 512},
    cuda_graph=True,
    available=triton_missing,
)
IMPLEMENTATIONS = {
    "cpp": Implementation(
        capability=Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            multiples={"head_dim": 16},
            available=compiler_missing,
        ),
        launcher=f"{_PACKAGE}._cpu:block_attention",
    ),
    "cpp_invariant": Implementation(
        capability=Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            multiples={"head_dim": 16},
            features=frozenset({BATCH_INVARIANT}),
            available=compiler_missing,
        ),
        launcher=f"{_PACKAGE}._cpu_invariant:block_attention",
    ),
    "triton": Implementation(
        capability=_TRITON_CAPABILITY, launcher=f"{_PACKAGE}._triton:block_attention"
    ),
    "triton_invariant": Implementation(
        capability=replace(_TRITON_CAPABILITY, features=frozenset({BATCH_INVARIANT})),
        launcher=f"{_PACKAGE}._triton_invariant:block_attention",
    ),
    "torch": Implementation(
        capability=Capability(devices=frozenset({"cpu", "cuda"}), dtypes=FLOATS_AND_FLOAT64),
        launcher=f"{_PACKAGE}._torch:block_attention",
    ),
}


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    kv: Tensor,
    blocks: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
    scale: float,
    impl: str,
) -> Tensor:
    """Write the new keys and values into their pages, then attend to the blocks of each query.

    A sequence's tokens are cut into blocks of ``block_size``. A query at position p sees the
    tokens of the blocks that ``blocks`` names for it, and those that follow the last of the
    ``(p + 1) // block_size`` blocks that are complete at p. N sequences, their T new tokens
    packed, Hq query heads, Hkv key heads (query head i reads key head ``i // (Hq // Hkv)``), P
    pages. Page 0 is null: it is neither read nor written. Tokens from ``cu_seqlens[N]`` on are
    padding.

    Args:
        q: [T, Hq, D], float32, bfloat16 or float16; any strides that keep D contiguous.
        k: [T, Hkv, D], as q.
        v: [T, Hkv, D], as q; or None: keys are the values as well, and all query heads share one,
            as they do in latent attention without rotation (MLA, absorbed). k is then [T, D].
        kv: [2, P, page_size, Hkv, D], dtype of q, contiguous; keys in ``kv[0]``, values in
            ``kv[1]``; [P, page_size, D] without v. **Mutated**: the rows that ``slot_mapping``
            names.
        blocks: [T, K] int32, contiguous, the distinct blocks of each query by number, complete at
            its position; -1 after them. As ``select_blocks`` returns them.
        cu_seqlens: [N + 1] int32, offsets of each sequence's new tokens, from 0.
        seq_lens: [N] int32, total length of each sequence, new tokens included.
        page_table: [N, max_pages] int32; entry j holds positions ``[j * page_size, (j + 1) *
            page_size)``.
        slot_mapping: [T] int32, ``page * page_size + offset`` of each new token.
        block_size: tokens in a block; it divides ``page_size``.
        scale: factor of the logits, usually ``D ** -0.5``.
        impl: name in IMPLEMENTATIONS.

    Returns:
        [T, Hq, D] in the dtype of q; rows of padding tokens, and of queries that see nothing, are
        0.

    Raises:
        ValueError: a shape, dtype or option is wrong, or, where reading it is free (on a CPU),
            an index is outside its pool.
    """
    _validate(q, k, v, kv, blocks, cu_seqlens, seq_lens, page_table, slot_mapping)
    check_scale(scale)
    page_size = kv.shape[2 if v is not None else 1]
    if block_size < 1 or page_size % block_size:
        raise ValueError(
            f"block_size must divide the {page_size} tokens of a page, got {block_size}"
        )
    check_impl(impl, IMPLEMENTATIONS, q.device, {"head_dim": q.shape[-1]}, dtype=q.dtype)
    out: Tensor = _BLOCK_ATTENTION(
        q,
        k,
        v,
        kv,
        blocks,
        cu_seqlens,
        seq_lens,
        page_table,
        slot_mapping,
        block_size=block_size,
        scale=scale,
        impl=impl,
    )
    return out


def _validate(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    kv: Tensor,
    blocks: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
) -> None:
    kv_rank = 3 if v is None else 5
    ranks = {"q": (q, 3), "kv": (kv, kv_rank), "blocks": (blocks, 2), "page_table": (page_table, 2)}
    for name, (tensor, dim) in ranks.items():
        if tensor.dim() != dim:
            raise ValueError(f"{name} must have {dim} dimensions, got {tensor.dim()}")
    num_tokens, num_q_heads, head_dim = q.shape
    heads = kv.shape[3:-1]  # one that has no dimension, without v
    num_kv_heads = heads[0] if heads else 1
    num_seqs = page_table.shape[0]
    planes = () if v is None else (2,)
    check_shapes(
        {
            "kv": (kv, (*planes, *kv.shape[len(planes) :][:2], *heads, head_dim)),
            "k": (k, (num_tokens, *heads, head_dim)),
            "v": (v, (num_tokens, *heads, head_dim)),
            "blocks": (blocks, (num_tokens, blocks.shape[1])),
            "cu_seqlens": (cu_seqlens, (num_seqs + 1,)),
            "seq_lens": (seq_lens, (num_seqs,)),
            "slot_mapping": (slot_mapping, (num_tokens,)),
        }
    )
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"q heads must be a multiple of the {num_kv_heads} key heads, got {num_q_heads}"
        )
    if q.dtype not in FLOATS_AND_FLOAT64:
        raise ValueError(f"q must be a floating point tensor, got {q.dtype}")
    index = {
        "blocks": blocks,
        "cu_seqlens": cu_seqlens,
        "seq_lens": seq_lens,
        "slot_mapping": slot_mapping,
    }
    check_dtypes(
        {
            "k": (k, q.dtype),
            "v": (v, q.dtype),
            "kv": (kv, q.dtype),
            "page_table": (page_table, torch.int32),
            **{name: (tensor, torch.int32) for name, tensor in index.items()},
        }
    )
    for name, given in (("q", q), ("k", k), ("v", v), ("page_table", page_table)):
        if given is not None and given.stride(-1) != 1:
            raise ValueError(f"{name} must have a contiguous last dim, got {given.stride()}")
    check_contiguous(kv=kv, **index)


_BLOCK_ATTENTION = define_op(
    "block_attention(Tensor q, Tensor k, Tensor? v, Tensor(a!) kv, Tensor blocks, "
    "Tensor cu_seqlens, Tensor seq_lens, Tensor page_table, Tensor slot_mapping, *, "
    "int block_size, float scale, str impl) -> Tensor",
    like=["q"],
    implementations=IMPLEMENTATIONS,
)
