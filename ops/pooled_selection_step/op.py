"""pooled_selection_step: public function, validation, schema and the list of implementations.

Pooling and selection of a decode step in one op: each by itself takes little, and costs as much
again to be called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_hybrid.ops.core.capability import FLOATS_AND_FLOAT64, Capability, Implementation
from torch_hybrid.ops.core.registration import (
    check_contiguous,
    check_dtypes,
    check_impl,
    check_shapes,
    define_op,
)
from torch_hybrid.ops.triton.devices import triton_devices, triton_missing

_PACKAGE = "torch_hybrid.ops.pooled_selection_step"

IMPLEMENTATIONS = {
    "triton": Implementation(
        capability=Capability(
            devices=triton_devices(),
            # Products of float32 are no tensor core's, and take registers for every element.
            dtypes=frozenset({torch.bfloat16, torch.float16}),
            limits={"block_size": 64, "index_dim": 128, "num_index_heads": 64},
            cuda_graph=True,
            available=triton_missing,
        ),
        launcher=f"{_PACKAGE}._triton:pooled_selection_step",
    ),
    "torch": Implementation(
        capability=Capability(devices=frozenset({"cpu", "cuda"}), dtypes=FLOATS_AND_FLOAT64),
        launcher=f"{_PACKAGE}._torch:pooled_selection_step",
    ),
}


def pooled_selection_step(
    q: Tensor,
    keys: Tensor,
    gates: Tensor,
    bias: Tensor,
    weights: Tensor | None,
    state: Tensor,
    block_keys: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    top_k: int,
    impl: str,
) -> Tensor:
    """Pool the key of a block that is now complete, write it, and choose blocks for each query.

    For sequences of one new token or none it is ``gated_pooling``, and ``select_blocks`` with the
    keys that it makes. N sequences, T tokens, H index heads, blocks of B tokens, P pages of
    ``page_size / B`` blocks each, S slots. Page 0 and slot 0 are nobody's.

    Args:
        q: [T, H, D] index queries, float32, bfloat16 or float16; D contiguous.
        keys: [T, D] of tokens, in q's dtype; rows may lie any distance apart, one row is
            contiguous.
        gates: [T, D], as keys.
        bias: [B, D] of gates, by place in a block; q's dtype, contiguous.
        weights: [T, H] float32, or None: all are 1.
        state: [S, B - 1, 2, D] in q's dtype, contiguous: key and gate of the tokens of a block that
            is not complete. **Mutated** at ``state_indices``, as in ``gated_pooling``.
        block_keys: [P, page_size / B, D] in q's dtype, contiguous. **Mutated**: the rows of the
            blocks that the new tokens complete.
        cu_seqlens: [N + 1] int32, offsets of each sequence's token, from 0: each has one, or none.
            Tokens from ``cu_seqlens[N]`` on are padding.
        seq_lens: [N] int32, total length of each sequence, the new token included.
        page_table: [N, max_pages] int32; entry j holds positions ``[j * page_size, (j + 1) *
            page_size)``.
        slot_mapping: [T] int32, ``page * page_size + offset`` of each new token.
        initial_indices: [N] int32 slot that has what each sequence left of its last block; 0:
            zeros.
        state_indices: [N] int32 slot that receives what each sequence leaves, distinct except for
            0: that is not stored.
        top_k: most blocks that a query takes.
        impl: name in IMPLEMENTATIONS.

    Returns:
        [T, top_k] int32, the chosen blocks of each query by number, rising; -1 where there are
        fewer, and in rows of padding tokens.

    Raises:
        ValueError: a shape, dtype, layout or option is wrong, or, where reading it is free (on a
            CPU), an index is outside its pool or a sequence has several tokens.

    The indexer of GLM-5.3 in decode.
    """
    tensors = (
        q,
        keys,
        gates,
        bias,
        weights,
        state,
        block_keys,
        cu_seqlens,
        seq_lens,
        page_table,
        slot_mapping,
        initial_indices,
        state_indices,
    )
    _validate(*tensors)
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    sizes = {"block_size": len(bias), "index_dim": q.shape[2], "num_index_heads": q.shape[1]}
    check_impl(impl, IMPLEMENTATIONS, q.device, sizes, dtype=q.dtype)
    blocks: Tensor = _STEP(*tensors, top_k=top_k, impl=impl)
    return blocks


def _validate(
    q: Tensor,
    keys: Tensor,
    gates: Tensor,
    bias: Tensor,
    weights: Tensor | None,
    state: Tensor,
    block_keys: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> None:
    for name, tensor, dim in (
        ("q", q, 3),
        ("bias", bias, 2),
        ("block_keys", block_keys, 3),
        ("page_table", page_table, 2),
    ):
        if tensor.dim() != dim:
            raise ValueError(f"{name} must have {dim} dimensions, got {tensor.dim()}")
    if q.dtype not in FLOATS_AND_FLOAT64:
        raise ValueError(f"q must be a floating point tensor, got {q.dtype}")
    num_tokens, num_heads, dim = q.shape
    num_seqs, size = page_table.shape[0], bias.shape[0]
    index = {
        "cu_seqlens": cu_seqlens,
        "seq_lens": seq_lens,
        "slot_mapping": slot_mapping,
        "initial_indices": initial_indices,
        "state_indices": state_indices,
    }
    pools = {"bias": bias, "state": state, "block_keys": block_keys}
    check_shapes(
        {
            "keys": (keys, (num_tokens, dim)),
            "gates": (gates, (num_tokens, dim)),
            "bias": (bias, (size, dim)),
            "weights": (weights, (num_tokens, num_heads)),
            "state": (state, (state.shape[0], size - 1, 2, dim)),
            "block_keys": (block_keys, (*block_keys.shape[:2], dim)),
            "cu_seqlens": (cu_seqlens, (num_seqs + 1,)),
            "seq_lens": (seq_lens, (num_seqs,)),
            "slot_mapping": (slot_mapping, (num_tokens,)),
            "initial_indices": (initial_indices, (num_seqs,)),
            "state_indices": (state_indices, (num_seqs,)),
        }
    )
    check_dtypes(
        {
            "keys": (keys, q.dtype),
            "gates": (gates, q.dtype),
            "weights": (weights, torch.promote_types(q.dtype, torch.float32)),
            **{name: (tensor, q.dtype) for name, tensor in pools.items()},
            "page_table": (page_table, torch.int32),
            **{name: (tensor, torch.int32) for name, tensor in index.items()},
        }
    )
    rows = {"q": q, "keys": keys, "gates": gates, "page_table": page_table}
    for name, tensor in rows.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} must have a contiguous last dim, got {tensor.stride()}")
    check_contiguous(weights=weights, **pools, **index)


def _fake(q: Tensor, *_args: Any, top_k: int, **_options: Any) -> Tensor:
    return q.new_empty((q.shape[0], top_k), dtype=torch.int32)


_STEP = define_op(
    "pooled_selection_step(Tensor q, Tensor keys, Tensor gates, Tensor bias, Tensor? weights, "
    "Tensor(a!) state, Tensor(b!) block_keys, Tensor cu_seqlens, Tensor seq_lens, "
    "Tensor page_table, Tensor slot_mapping, Tensor initial_indices, Tensor state_indices, *, "
    "int top_k, str impl) -> Tensor",
    fake=_fake,
    implementations=IMPLEMENTATIONS,
)
