"""previous_rows: public function, validation, schema and the list of implementations."""

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
from torch_hybrid.ops.native import compiler_missing

_PACKAGE = "torch_hybrid.ops.previous_rows"

IMPLEMENTATIONS = {
    "cpp": Implementation(
        capability=Capability(
            devices=frozenset({"cpu"}), dtypes=FLOATS_AND_FLOAT64, available=compiler_missing
        ),
        launcher=f"{_PACKAGE}._cpu:previous_rows",
    ),
    "torch": Implementation(
        capability=Capability(
            devices=frozenset({"cpu", "cuda"}), dtypes=FLOATS_AND_FLOAT64, cuda_graph=True
        ),
        launcher=f"{_PACKAGE}._torch:previous_rows",
    ),
}


def previous_rows(
    x: Tensor,
    tokens: Tensor,
    kept: Tensor,
    kept_tokens: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    *,
    impl: str,
) -> Tensor:
    """The row before each token's, of this step or of one before; keeps the last rows and tokens.

    A slot keeps R of each: those of the sequence's token p at p modulo R, until the token at p + R
    comes. So tokens that turn out not to count are rolled back by the sequence's length alone.

    Args:
        x: [T, D] float dtype, a row for each new token of N sequences, packed.
        tokens: [T] int64, the tokens themselves.
        kept: [S, R, D] in the dtype of x, by slot. **Mutated** at ``state_indices``.
        kept_tokens: [S, R] int64, by slot. **Mutated** there too.
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0. Tokens from
            ``cu_seqlens[N]`` on are padding.
        seq_lens: [N] int32 total lengths, the new tokens included.
        initial_indices: [N] int32 slot that each sequence goes on from; 0: it begins, after zeros.
        state_indices: [N] int32 slot that keeps a sequence's rows, distinct except for 0: those are
            not kept. Where it is another than the initial one, the row before the new ones is
            copied to it, also for a sequence without new tokens.
        impl: name in IMPLEMENTATIONS.

    Returns:
        [T, D]; rows of padding tokens are 0.

    Raises:
        ValueError: a shape, dtype or layout is not as above, ``impl`` is unknown, or, where reading
            them is free (on a CPU), an index is out of range.
    """
    pools, index = (kept, kept_tokens), (cu_seqlens, seq_lens, initial_indices, state_indices)
    _validate(x, tokens, *pools, *index)
    check_impl(impl, IMPLEMENTATIONS, x.device, dtype=x.dtype)
    out: Tensor = _PREVIOUS_ROWS(x, tokens, *pools, *index, impl=impl)
    return out


def _validate(
    x: Tensor,
    tokens: Tensor,
    kept: Tensor,
    kept_tokens: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> None:
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(f"x must be [T, D] of a float dtype, got {x.dtype} {list(x.shape)}")
    if kept.ndim != 3:
        raise ValueError(f"kept must be [S, R, D], got {list(kept.shape)}")
    num_seqs, (num_slots, num_kept, _) = state_indices.shape[0], kept.shape
    check_shapes(
        {
            "tokens": (tokens, (x.shape[0],)),
            "kept": (kept, (num_slots, num_kept, x.shape[1])),
            "kept_tokens": (kept_tokens, (num_slots, num_kept)),
            "cu_seqlens": (cu_seqlens, (num_seqs + 1,)),
            "seq_lens": (seq_lens, (num_seqs,)),
            "initial_indices": (initial_indices, (num_seqs,)),
        }
    )
    index = {
        "cu_seqlens": cu_seqlens,
        "seq_lens": seq_lens,
        "initial_indices": initial_indices,
        "state_indices": state_indices,
    }
    ids = {"tokens": tokens, "kept_tokens": kept_tokens}
    check_dtypes(
        {
            "kept": (kept, x.dtype),
            **{name: (i, torch.int64) for name, i in ids.items()},
            **{name: (i, torch.int32) for name, i in index.items()},
        }
    )
    check_contiguous(x=x, kept=kept, **ids, **index)


def _fake(x: Tensor, *_args: Any, **_options: Any) -> Tensor:
    return torch.empty_like(x)


_PREVIOUS_ROWS = define_op(
    "previous_rows(Tensor x, Tensor tokens, Tensor(a!) kept, Tensor(b!) kept_tokens, "
    "Tensor cu_seqlens, Tensor seq_lens, Tensor initial_indices, Tensor state_indices, "
    "*, str impl) -> Tensor",
    fake=_fake,
    implementations=IMPLEMENTATIONS,
)
