"""Ragged sequences in vectorised torch: which of them are live, and where their chunks lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The sequences that have work to do, the longest first: those left at a step lead."""

    starts: Tensor
    lengths: Tensor
    slots: Tensor
    has_initial_state: Tensor
    max_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The chunks of all sequences, X in number, those of one sequence next to each other.

    ``first [N]`` is the first chunk of each sequence; ``token [X, C]`` the token of each row,
    repeating the last one where ``is_real [X, C]`` is False.
    """

    first: Tensor
    token: Tensor
    is_real: Tensor


def live_sequences(
    cu_seqlens: Tensor, state_indices: Tensor, has_initial_state: Tensor
) -> Sequences:
    """Leave out empty sequences and those in the null slot; order by length, descending."""
    lengths = torch.where(state_indices > 0, cu_seqlens.diff(), 0)
    order = lengths.argsort(descending=True)[: int((lengths > 0).sum())]
    return Sequences(
        starts=cu_seqlens[order],
        lengths=lengths[order],
        slots=state_indices[order],
        has_initial_state=has_initial_state[order],
        max_length=int(lengths.max()) if len(lengths) else 0,
    )


def initial_states(state: Tensor, seqs: Sequences) -> Tensor:
    """A copy of the states that ``seqs`` start from, whatever a new sequence's slot holds."""
    return state[seqs.slots].where(seqs.has_initial_state[:, None, None, None], 0.0)


def chunk_table(seqs: Sequences, chunk_size: int) -> Chunks:
    """Cut each sequence into chunks, counted from its first token."""
    num_chunks = (seqs.lengths + chunk_size - 1) // chunk_size
    first = num_chunks.cumsum(0) - num_chunks
    seq = torch.repeat_interleave(num_chunks)
    ordinal = torch.arange(len(seq), device=seq.device) - first[seq]
    row = ordinal[:, None] * chunk_size + torch.arange(chunk_size, device=seq.device)
    length = seqs.lengths[seq, None]
    token = seqs.starts[seq, None] + torch.minimum(row, length - 1)
    return Chunks(first=first, token=token, is_real=row < length)
