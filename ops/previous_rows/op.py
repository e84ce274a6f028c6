"""previous_rows: public function, validation, schema and the list of implementations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_hybrid.ops.capability import FLOATS_AND_FLOAT64, Capability, Implementation
from torch_hybrid.ops.native import compiler_missing
from torch_hybrid.ops.registration import (
    check_contiguous,
    check_dtypes,
    check_impl,
    check_shapes,
    define_op,
)
from torch_hybrid.ops.verify import check_records

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
    last: Tensor,
    records: Tensor | None,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    accepted: Tensor | None,
    *,
    impl: str,
) -> Tensor:
    """The row before each token's: of the token before it, or what its sequence's slot kept.

    With ``accepted``, only the first new token of a sequence is certain: its row goes to ``last``,
    those after it to ``records``, and the step after it says how many of them count.

    Args:
        x: [T, D] float dtype, a row for each new token of N sequences, packed.
        last: [S, D] in the dtype of x, by slot the row of the last certain token. **Mutated**: slot
            ``state_indices[i]`` receives that of sequence i.
        records: [S, K, D] in the dtype of x, by slot those of up to K tokens after it; needed with
            ``accepted``. **Mutated** there, at the slots that ``last`` is.
        cu_seqlens: [N + 1] int32 offsets of the sequences in T, from 0. Tokens from
            ``cu_seqlens[N]`` on are padding. A sequence without tokens keeps what it has; with
            accepted records, the last of those becomes its ``last``.
        initial_indices: [N] int32 slot that each sequence goes on from; 0: it begins, after zeros.
        state_indices: [N] int32 slot that keeps a sequence's rows, distinct except for 0: those are
            not stored.
        accepted: [N] int32, records that count: sequence i goes on from the last of those.
        impl: name in IMPLEMENTATIONS.

    Returns:
        [T, D]; rows of padding tokens are 0.

    Raises:
        ValueError: a shape, dtype or layout is not as above, or ``impl`` is unknown.
    """
    _validate(x, last, records, cu_seqlens, initial_indices, state_indices, accepted)
    check_impl(impl, IMPLEMENTATIONS, x.device, dtype=x.dtype)
    out: Tensor = _PREVIOUS_ROWS(
        x, last, records, cu_seqlens, initial_indices, state_indices, accepted, impl=impl
    )
    return out


def _validate(
    x: Tensor,
    last: Tensor,
    records: Tensor | None,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    accepted: Tensor | None,
) -> None:
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(f"x must be [T, D] of a float dtype, got {x.dtype} {list(x.shape)}")
    num_seqs, num_slots, width = state_indices.shape[0], last.shape[0], x.shape[1]
    check_shapes(
        {
            "last": (last, (num_slots, width)),
            "cu_seqlens": (cu_seqlens, (num_seqs + 1,)),
            "initial_indices": (initial_indices, (num_seqs,)),
        }
    )
    index = {
        "cu_seqlens": cu_seqlens,
        "initial_indices": initial_indices,
        "state_indices": state_indices,
    }
    check_dtypes({"last": (last, x.dtype), **{name: (i, torch.int32) for name, i in index.items()}})
    check_contiguous(x=x, last=last, **index)
    if accepted is not None:
        if records is None:
            raise ValueError("accepted counts records, and there are none")
        check_records(
            records,
            accepted,
            num_slots=num_slots,
            width=width,
            dtype=x.dtype,
            num_seqs=num_seqs,
        )


def _fake(x: Tensor, *_args: Any, **_options: Any) -> Tensor:
    return torch.empty_like(x)


_PREVIOUS_ROWS = define_op(
    "previous_rows(Tensor x, Tensor(a!) last, Tensor(b!)? records, Tensor cu_seqlens, "
    "Tensor initial_indices, Tensor state_indices, Tensor? accepted, *, str impl) -> Tensor",
    fake=_fake,
    implementations=IMPLEMENTATIONS,
)
