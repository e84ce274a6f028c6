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
    tensors="x tokens kept kept_tokens cu_seqlens seq_lens initial_indices state_indices out",
    integers="num_tokens num_seqs num_slots num_kept row_bytes num_threads",
)


def previous_rows(
    x: Tensor,
    tokens: Tensor,
    kept: Tensor,
    kept_tokens: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> Tensor:
    """Launcher of ``torch_hybrid::previous_rows``."""
    out = torch.empty_like(x)
    in_range = _RUN(
        x,
        tokens,
        kept,
        kept_tokens,
        cu_seqlens,
        seq_lens,
        initial_indices,
        state_indices,
        out,
        x.shape[0],
        state_indices.shape[0],
        kept.shape[0],
        kept.shape[1],
        x.shape[1] * x.element_size(),
        torch.get_num_threads(),
    )
    if not in_range:
        check_indices(kept, cu_seqlens, seq_lens, initial_indices, state_indices, x.shape[0])
    return out
