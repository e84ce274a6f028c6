"""select_blocks: public function, validation, schema and the list of implementations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
    check_shapes,
    define_op,
)
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

_PACKAGE = "torch_hybrid.ops.select_blocks"

_TRITON_CAPABILITY = Capability(
    devices=triton_devices(),
    limits={"index_dim": 256},
    cuda_graph=True,
    available=triton_missing,
)
IMPLEMENTATIONS = {
    "cpp": Implementation(
        capability=Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16}),
            multiples={"index_dim": 16},
            features=frozenset({BATCH_INVARIANT}),
            available=compiler_missing,
        ),
        launcher=f"{_PACKAGE}._cpu:select_blocks",
    ),
    "triton": Implementation(
        capability=_TRITON_CAPABILITY, launcher=f"{_PACKAGE}._triton:select_blocks"
    ),
    "triton_invariant": Implementation(
        capability=replace(_TRITON_CAPABILITY, features=frozenset({BATCH_INVARIANT})),
        launcher=f"{_PACKAGE}._triton_invariant:select_blocks",
    ),
    "torch": Implementation(
        capability=Capability(devices=frozenset({"cpu", "cuda"}), dtypes=FLOATS_AND_FLOAT64),
        launcher=f"{_PACKAGE}._torch:select_blocks",
    ),
}


def select_blocks(
    q: Tensor,
    keys: Tensor,
    weights: Tensor | None,
    block_keys: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
    top_k: int,
    impl: str,
) -> Tensor:
    """Write the keys of blocks that are now complete, then choose the best blocks for each query.

    A sequence's tokens are cut into blocks of ``block_size``. A query at position p may choose
    among the ``(p + 1) // block_size`` blocks that end at p or before; block b has the score
    ``sum_h weights[h] * relu(q[h] . key_b)`` in float32. Of equal scores the earlier block is
    taken. N sequences, their T new tokens packed, H index heads, P pages of ``page_size /
    block_size`` blocks each. Page 0 is null: it is neither read nor written. Tokens from
    ``cu_seqlens[N]`` on are padding.

    Args:
        q: [T, H, D] index queries, float32, bfloat16 or float16; D contiguous.
        keys: [T, D] in q's dtype: the key of the block that a token is the last of. Those of
            other tokens are not read.
        weights: [T, H] float32, or None: all are 1.
        block_keys: [P, page_size / block_size, D] in q's dtype, contiguous. **Mutated**: the rows
            of the blocks that the new tokens complete.
        cu_seqlens: [N + 1] int32, offsets of each sequence's new tokens, from 0.
        seq_lens: [N] int32, total length of each sequence, new tokens included.
        page_table: [N, max_pages] int32; entry j holds positions ``[j * page_size, (j + 1) *
            page_size)``.
        slot_mapping: [T] int32, ``page * page_size + offset`` of each new token.
        block_size: tokens in a block; it divides a page.
        top_k: most blocks that a query takes.
        impl: name in IMPLEMENTATIONS.

    Returns:
        [T, top_k] int32, the chosen blocks of each query by number, rising; -1 where there are
        fewer, and in rows of padding tokens.

    Raises:
        ValueError: a shape, dtype or option is wrong, or, where reading it is free (on a CPU),
            an index is outside its pool.

    The token indexer of Qwen4-Exp (one key for each block, the mean of its tokens' keys), and of
    GLM-5.3 (``weights``, keys that are pooled by gates).
    """
    _validate(q, keys, weights, block_keys, cu_seqlens, seq_lens, page_table, slot_mapping)
    if block_size < 1 or top_k < 1:
        raise ValueError(f"block_size and top_k must be at least 1, got {block_size} and {top_k}")
    check_impl(impl, IMPLEMENTATIONS, q.device, {"index_dim": q.shape[-1]}, dtype=q.dtype)
    blocks: Tensor = _SELECT_BLOCKS(
        q,
        keys,
        weights,
        block_keys,
        cu_seqlens,
        seq_lens,
        page_table,
        slot_mapping,
        block_size=block_size,
        top_k=top_k,
        impl=impl,
    )
    return blocks


def _validate(
    q: Tensor,
    keys: Tensor,
    weights: Tensor | None,
    block_keys: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
) -> None:
    for name, tensor, dim in (
        ("q", q, 3),
        ("block_keys", block_keys, 3),
        ("page_table", page_table, 2),
    ):
        if tensor.dim() != dim:
            raise ValueError(f"{name} must have {dim} dimensions, got {tensor.dim()}")
    num_tokens, num_heads, index_dim = q.shape
    num_seqs = page_table.shape[0]
    check_shapes(
        {
            "keys": (keys, (num_tokens, index_dim)),
            "weights": (weights, (num_tokens, num_heads)),
            "block_keys": (block_keys, (*block_keys.shape[:2], index_dim)),
            "cu_seqlens": (cu_seqlens, (num_seqs + 1,)),
            "seq_lens": (seq_lens, (num_seqs,)),
            "slot_mapping": (slot_mapping, (num_tokens,)),
        }
    )
    if q.dtype not in FLOATS_AND_FLOAT64:
        raise ValueError(f"q must be a floating point tensor, got {q.dtype}")
    index = {"cu_seqlens": cu_seqlens, "seq_lens": seq_lens, "slot_mapping": slot_mapping}
    check_dtypes(
        {
            "keys": (keys, q.dtype),
            "weights": (weights, torch.promote_types(q.dtype, torch.float32)),
            "block_keys": (block_keys, q.dtype),
            "page_table": (page_table, torch.int32),
            **{name: (tensor, torch.int32) for name, tensor in index.items()},
        }
    )
    for name, tensor in (("q", q), ("keys", keys), ("page_table", page_table)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} must have a contiguous last dim, got {tensor.stride()}")
    check_contiguous(weights=weights, block_keys=block_keys, **index)


def _fake(q: Tensor, *_args: Any, top_k: int, **_options: Any) -> Tensor:
    return q.new_empty((q.shape[0], top_k), dtype=torch.int32)


_SELECT_BLOCKS = define_op(
    "select_blocks(Tensor q, Tensor keys, Tensor? weights, Tensor(a!) block_keys, "
    "Tensor cu_seqlens, Tensor seq_lens, Tensor page_table, Tensor slot_mapping, *, "
    "int block_size, int top_k, str impl) -> Tensor",
    fake=_fake,
    implementations=IMPLEMENTATIONS,
)
