"""Implementation "cpp": the C++ kernel of _cpu.cpp, which copies rows of any dtype."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from torch_hybrid.ops.native.call import kernel
from torch_hybrid.ops.ngram_embedding.bounds import check_indices

_RUN = kernel(
    "ngram_embedding",
    Path(__file__).with_name("_cpu.cpp"),
    tensors="tokens table multipliers head_sizes head_offsets history "
    "cu_seqlens initial_indices state_indices out",
    integers="num_tokens num_seqs num_slots num_rows row_bytes num_back num_heads eos num_threads",
)


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
) -> Tensor:
    """Launcher of ``torch_hybrid::ngram_embedding``."""
    num_tokens, num_heads = tokens.shape[0], head_sizes.shape[0]
    out = table.new_empty((num_tokens, num_heads * table.shape[1]))
    in_range = _RUN(
        tokens,
        table,
        multipliers,
        head_sizes,
        head_offsets,
        history,
        cu_seqlens,
        initial_indices,
        state_indices,
        out,
        num_tokens,
        state_indices.shape[0],
        history.shape[0],
        table.shape[0],
        table.shape[1] * table.element_size(),
        history.shape[1],
        num_heads,
        eos,
        torch.get_num_threads(),
    )
    if not in_range:
        check_indices(
            table,
            head_sizes,
            head_offsets,
            cu_seqlens,
            initial_indices,
            state_indices,
            num_tokens=num_tokens,
            num_slots=history.shape[0],
        )
    return out
