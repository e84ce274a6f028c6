"""Implementation "cpp": the C++ kernel of _cpu.cpp, which copies rows of any dtype."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native.call import kernel
from torch_hybrid.ops.previous_rows.bounds import check_indices

_RUN = kernel(
    "previous_rows",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="x last records cu_seqlens initial_indices state_indices accepted out",
    integers="num_tokens num_seqs num_slots num_records row_bytes num_threads",
)


def previous_rows(
    x: Tensor,
    last: Tensor,
    records: Tensor | None,
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
    accepted: Tensor | None,
) -> Tensor:
    """Launcher of ``torch_hybrid::previous_rows``."""
    out = torch.empty_like(x)
    in_range = _RUN(
        x,
        last,
        records,
        cu_seqlens,
        initial_indices,
        state_indices,
        accepted,
        out,
        x.shape[0],
        state_indices.shape[0],
        last.shape[0],
        0 if records is None else records.shape[1],
        x.shape[1] * x.element_size(),
        torch.get_num_threads(),
    )
    if not in_range:
        check_indices(
            last, records, cu_seqlens, initial_indices, state_indices, accepted, x.shape[0]
        )
    return out
