"""Checks of the index tensors of block attention, for indices that are on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.page_bounds import check_page_indices


def check_indices(
    blocks: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    slot_mapping: Tensor,
    *,
    num_pages: int,
    page_size: int,
    block_size: int,
) -> None:
    """Raise ValueError unless every index that a call uses is inside its pool, and every block is
    complete where it is seen."""
    check_page_indices(
        cu_seqlens, seq_lens, page_table, slot_mapping, num_pages=num_pages, page_size=page_size
    )
    num_new = cu_seqlens.diff()
    num_tokens = int(cu_seqlens[-1])
    first = torch.repeat_interleave(seq_lens - cu_seqlens[1:], num_new, output_size=num_tokens)
    seen = (first + torch.arange(num_tokens, dtype=torch.int32, device="cpu") + 1) // block_size
    rows = blocks[:num_tokens]
    wrong = (rows < -1) | (rows >= seen[:, None])
    if bool(wrong.any()):
        token = int(wrong.any(1).nonzero()[0])
        raise ValueError(
            f"blocks[{token}] must be in [-1, {int(seen[token])}), the blocks that are complete "
            f"there, got {rows[token].tolist()}"
        )
