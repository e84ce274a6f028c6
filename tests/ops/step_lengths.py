"""What planners are told of a step, of the tensors that a test has."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.planning import Lengths


def step_lengths(
    cu_seqlens: Tensor,
    num_tokens: int,
    *,
    seq_lens: Tensor | None = None,
    page_table: Tensor | None = None,
    initial_indices: Tensor | None = None,
    state_indices: Tensor | None = None,
) -> Lengths:
    """Tensors on the host; sequences hold nothing, own nothing, and keep no state by default."""
    none = torch.zeros(len(cu_seqlens) - 1, dtype=torch.int32)

    def held(tensor: Tensor | None, otherwise: Tensor) -> Tensor:
        return otherwise if tensor is None else tensor.cpu()

    return Lengths(
        cu_seqlens=cu_seqlens.cpu(),
        seq_lens=held(seq_lens, cu_seqlens.cpu().diff()),
        page_table=held(page_table, none[:, None]),
        initial_indices=held(initial_indices, none),
        state_indices=held(state_indices, none),
        num_tokens=num_tokens,
    )
