"""Decode steps for FlashInfer's recurrences: row n is the one token of sequence n.

What is planned is which states are read. FlashInfer passes over a sequence whose slot is -1; it has
no null slot, so that only states which are read and kept are left where they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_hybrid.ops.core.planning import Lengths, Planned

IN_PLACE, APART = 0, 1  # in the pool, or packed: see ``ops.flashinfer.states``


def plan(lengths: Lengths, **_: object) -> Planned:
    """Plan a decode step: the slots [N] that FlashInfer reads, and whether they are in the pool.

    Raises:
        ValueError: a sequence has more than one token, or its row is not its own.
    """
    has_token = has_tokens(lengths)
    initial, final = (
        slots[has_token] for slots in (lengths.initial_indices, lengths.state_indices)
    )
    place = IN_PLACE if initial.all() and final.all() else APART
    row = torch.arange(len(has_token), dtype=torch.int32, device="cpu")
    slots = lengths.initial_indices if place == IN_PLACE else row
    return Planned(tensors=(slots.where(has_token, -1),), values=(place,))


def has_tokens(lengths: Lengths) -> Tensor:
    """Tell which of N sequences have a token.

    Raises:
        ValueError: a sequence has more than one token, or its row is not its own.
    """
    num_seqs, num_live = lengths.state_indices.shape[0], lengths.cu_seqlens[-1]
    row = torch.arange(num_seqs, dtype=torch.int32, device="cpu")
    expected = (row + 1).clamp(max=num_live)
    if lengths.num_tokens != num_seqs or not torch.equal(lengths.cu_seqlens[1:], expected):
        raise ValueError(
            "FlashInfer's decode takes a row for each sequence, one token in each, and sequences "
            f"without a token last; got {lengths.num_tokens} rows and "
            f"cu_seqlens {lengths.cu_seqlens.tolist()}"
        )
    return row < num_live
