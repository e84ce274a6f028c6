"""Indices and sums by which the vectorised torch forms of recurrent ops walk ragged batches.

Sequences with work to do are ordered by length, the longest first. So those that have a further
token, or a further chunk, are always a leading slice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_hybrid.ops.core.declare import StatefulOp
from torch_hybrid.ops.core.packed import PackedOp

# exp of it is 0 in float32; a finite stand-in for a decay of -inf, whose differences are NaN.
FULL_DECAY = -1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The sequences that have work to do, the longest first."""

    starts: Tensor
    lengths: Tensor
    initial: Tensor  # slots that they start from; 0: from zeros
    slots: Tensor  # slots that receive their states; 0: none does
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


def sequences_of(x: StatefulOp) -> Sequences:
    """Order the sequences that are not empty; raise ValueError for an index out of range, on a CPU.

    Torch takes negative indices from the end, and finds others only after some states are written.
    """
    if x.cu_seqlens.device.type == "cpu":
        StatefulOp.check_indices(x)
    return _ordered(x.cu_seqlens, x.initial_indices, x.state_indices)


def packed_sequences(x: PackedOp) -> Sequences:
    """Order sequences likewise, each of which has the state of its number."""
    if x.cu_seqlens.device.type == "cpu":
        PackedOp.check_indices(x)
    slots = torch.arange(x.num_seqs, dtype=torch.int32, device=x.cu_seqlens.device)
    return _ordered(x.cu_seqlens, slots, slots)


def _ordered(cu_seqlens: Tensor, initial_indices: Tensor, state_indices: Tensor) -> Sequences:
    lengths = cu_seqlens.diff()
    order = lengths.argsort(descending=True)[: int((lengths > 0).sum())]
    return Sequences(
        starts=cu_seqlens[order],
        lengths=lengths[order],
        initial=initial_indices[order],
        slots=state_indices[order],
        max_length=int(lengths.max()) if len(lengths) else 0,
    )


def initial_states(state: Tensor, seqs: Sequences) -> Tensor:
    """Copy the states [N, ...] that ``seqs`` start from; slot 0 gives zeros."""
    is_there = (seqs.initial > 0).view(-1, *[1] * (state.ndim - 1))
    return state[seqs.initial].where(is_there, 0.0)


def store_states(state: Tensor, seqs: Sequences, S: Tensor) -> None:
    """Leave the states ``S [N, ...]`` in the slots of ``seqs``."""
    is_stored = seqs.slots > 0
    if bool(is_stored.all()):
        state[seqs.slots] = S
    else:
        state[seqs.slots[is_stored]] = S[is_stored]


def chunk_table(seqs: Sequences, chunk_size: int) -> Chunks:
    """Cut each sequence into chunks, from its first token on."""
    num_chunks = (seqs.lengths + chunk_size - 1) // chunk_size
    first = num_chunks.cumsum(0) - num_chunks
    seq = torch.repeat_interleave(num_chunks)
    ordinal = torch.arange(len(seq), dtype=torch.int64, device=seq.device) - first[seq]
    within = torch.arange(chunk_size, dtype=torch.int64, device=seq.device)
    row = ordinal[:, None] * chunk_size + within
    length = seqs.lengths[seq, None]
    token = seqs.starts[seq, None] + torch.minimum(row, length - 1)
    return Chunks(first=first, token=token, is_real=row < length)


def chunk_steps(seqs: Sequences, chunks: Chunks) -> list[Tensor]:
    """List the chunks [num_left] that each step of a scan takes: those of the longest sequences."""
    size = chunks.token.shape[1]
    steps = range(-(-seqs.max_length // size))
    return [chunks.first[: int((seqs.lengths > step * size).sum())] + step for step in steps]


def scatter_rows(grad: Tensor, like: Tensor, chunks: Chunks) -> Tensor:
    """Bring rows of chunks [X, H, C, .] back to their tokens; padding tokens have gradient 0."""
    out = torch.zeros_like(like, memory_format=torch.contiguous_format)
    rows = grad.transpose(1, 2)[chunks.is_real].to(like.dtype)
    out[chunks.token[chunks.is_real]] = rows.view(-1, *like.shape[1:])
    return out


def from_row_on(x: Tensor) -> Tensor:
    """Sum the rows of ``x [..., C, K]`` from each row on."""
    return x.flip(-2).cumsum(-2).flip(-2)


def before_row(x: Tensor) -> Tensor:
    """Sum the rows of ``x [..., C, K]`` before each row."""
    return pad(x[..., :-1, :], (0, 0, 1, 0)).cumsum(-2)
