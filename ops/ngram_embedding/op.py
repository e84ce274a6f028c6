"""ngram_embedding: public function, validation, schema and the list of implementations."""

from __future__ import annotations

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

_PACKAGE = "torch_hybrid.ops.ngram_embedding"

IMPLEMENTATIONS = {
    "cpp": Implementation(
        capability=Capability(
            devices=frozenset({"cpu"}),
            dtypes=FLOATS_AND_FLOAT64,
            features=frozenset({BATCH_INVARIANT}),
            available=compiler_missing,
        ),
        launcher=f"{_PACKAGE}._cpu:ngram_embedding",
    ),
    "triton": Implementation(
        capability=Capability(
            devices=triton_devices(),
            features=frozenset({BATCH_INVARIANT}),
            cuda_graph=True,
            available=triton_missing,
        ),
        launcher=f"{_PACKAGE}._triton:ngram_embedding",
    ),
    "torch": Implementation(
        capability=Capability(devices=frozenset({"cpu", "cuda"}), dtypes=FLOATS_AND_FLOAT64),
        launcher=f"{_PACKAGE}._torch:ngram_embedding",
    ),
}


def ngram_embedding(
    tokens: Tensor,
    table: Tensor,
    multipliers: Tensor,
    head_sizes: Tensor,
    head_offsets: Tensor,
    history: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    eos: int,
    impl: str,
) -> Tensor:
    """The rows of a table that hashes of each token's n-grams name, one after the other.

    For every m from 2 to n, the m tokens that end at token t are hashed to ``h = xor_i
    multipliers[i] * token[t - i]``, and each of the E heads of that order reads row ``offset + h
    mod size``. An n-gram does not reach across ``eos``: from the nearest eos before t backwards,
    and before the start of a sequence, ``eos`` stands in the place of tokens.

    Args:
        tokens: [T] int64, the new tokens of N sequences, packed.
        table: [R, D] float dtype, contiguous; on the tokens' device, or in pinned memory of the
            host.
        multipliers: [n] int64, of the tokens 0, 1, ... back; n from 2 on.
        head_sizes: [(n - 1) * E] int64, positive; the heads of order 2 first.
        head_offsets: the same, where a head's rows begin.
        history: [S, n - 1] int64, the last tokens of each sequence, oldest first. **Mutated**: slot
            ``state_indices[i]`` receives those of sequence i; no other slot is written.
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0. Tokens from
            ``cu_seqlens[N]`` on are padding. An empty sequence leaves its slot as it is.
        initial_indices: [N] int32 slot that each sequence goes on from; 0: it begins.
        state_indices: [N] int32 slot that receives the last tokens of each sequence, distinct
            except for 0: these are not stored.
        eos: the token that ends a text.
        impl: name in IMPLEMENTATIONS.

    Returns:
        [T, (n - 1) * E * D] in the table's dtype; rows of padding tokens are 0.

    Raises:
        ValueError: a shape, dtype or layout is not as above, ``impl`` is unknown, or, where reading
            them is free (on a CPU), an index is out of range.

    The per-layer embeddings of Qwen4-Exp.
    """
    _validate(
        tokens,
        table,
        multipliers,
        head_sizes,
        head_offsets,
        history,
        cu_seqlens,
        initial_indices,
        state_indices,
    )
    check_impl(impl, IMPLEMENTATIONS, tokens.device, dtype=table.dtype)
    out: Tensor = _NGRAM_EMBEDDING(
        tokens,
        table,
        multipliers,
        head_sizes,
        head_offsets,
        history,
        cu_seqlens,
        initial_indices,
        state_indices,
        eos=eos,
        impl=impl,
    )
    return out


def _validate(
    tokens: Tensor,
    table: Tensor,
    multipliers: Tensor,
    head_sizes: Tensor,
    head_offsets: Tensor,
    history: Tensor,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> None:
    if table.ndim != 2 or not table.is_floating_point():
        raise ValueError(
            f"table must be [rows, dim] of a float dtype, got {table.dtype} {list(table.shape)}"
        )
    (order,), (num_heads,) = multipliers.shape, head_sizes.shape
    if order < 2 or num_heads % (order - 1):
        raise ValueError(
            f"heads must be as many for each of the {order - 1} orders of n-grams, at least one of "
            f"them, got {num_heads}"
        )
    num_seqs = state_indices.shape[0]
    check_shapes(
        {
            "tokens": (tokens, (tokens.numel(),)),
            "head_offsets": (head_offsets, (num_heads,)),
            "history": (history, (history.shape[0], order - 1)),
            "cu_seqlens": (cu_seqlens, (num_seqs + 1,)),
            "initial_indices": (initial_indices, (num_seqs,)),
        }
    )
    hashed = {
        "tokens": tokens,
        "multipliers": multipliers,
        "head_sizes": head_sizes,
        "head_offsets": head_offsets,
        "history": history,
    }
    index = {
        "cu_seqlens": cu_seqlens,
        "initial_indices": initial_indices,
        "state_indices": state_indices,
    }
    check_dtypes(
        {
            **{name: (tensor, torch.int64) for name, tensor in hashed.items()},
            **{name: (tensor, torch.int32) for name, tensor in index.items()},
        }
    )
    check_contiguous(table=table, **hashed, **index)


def _fake(
    tokens: Tensor, table: Tensor, _m: Tensor, sizes: Tensor, *_args: Any, **_o: Any
) -> Tensor:
    return tokens.new_empty((tokens.shape[0], sizes.shape[0] * table.shape[1]), dtype=table.dtype)


_NGRAM_EMBEDDING = define_op(
    "ngram_embedding(Tensor tokens, Tensor table, Tensor multipliers, Tensor head_sizes, "
    "Tensor head_offsets, Tensor(a!) history, Tensor cu_seqlens, Tensor initial_indices, "
    "Tensor state_indices, *, int eos, str impl) -> Tensor",
    fake=_fake,
    implementations=IMPLEMENTATIONS,
)
