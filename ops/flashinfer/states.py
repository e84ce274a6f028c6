"""States for FlashInfer's kernels where it cannot work on those of the pool in place.

It knows no null slot: a state that begins at zero has to be there, and one that nobody keeps is
written all the same. States are packed then, one for each sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # elements of a state that a program moves


def packed_states(state: Tensor, cu_seqlens: Tensor, initial_indices: Tensor) -> Tensor:
    """Pack the states [N, ...] that sequences start from; rows without tokens are uninitialised."""
    num_seqs, size = initial_indices.shape[0], state[0].numel()
    packed = state.new_empty(num_seqs, *state.shape[1:])
    grid = (num_seqs, triton.cdiv(size, _BLOCK))
    _gather_kernel[grid](state, packed, cu_seqlens, initial_indices, SIZE=size, BLOCK=_BLOCK)
    return packed


def store_states(packed: Tensor, state: Tensor, cu_seqlens: Tensor, state_indices: Tensor) -> None:
    """Put packed states into their slots of the pool, but for those of sequences without tokens."""
    num_seqs, size = state_indices.shape[0], state[0].numel()
    grid = (num_seqs, triton.cdiv(size, _BLOCK))
    _scatter_kernel[grid](packed, state, cu_seqlens, state_indices, SIZE=size, BLOCK=_BLOCK)


def aligned(tensor: Tensor, num_bytes: int) -> Tensor:
    """Copy the tensor unless its address is a multiple of ``num_bytes``."""
    return tensor if tensor.data_ptr() % num_bytes == 0 else tensor.clone()


@triton.jit
def _gather_kernel(
    state: tl.tensor,
    initial: tl.tensor,
    cu_seqlens: tl.tensor,
    initial_indices: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy a block of one sequence's initial state from the pool; slot 0 gives zeros.

    Grid: (sequences, elements / BLOCK). Tile: BLOCK elements; sequences without tokens are skipped.
    """
    seq = tl.program_id(0).to(tl.int64)
    if tl.load(cu_seqlens + seq) == tl.load(cu_seqlens + seq + 1):
        return
    slot = tl.load(initial_indices + seq).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = tl.load(state + slot * SIZE + index, mask=(index < SIZE) & (slot > 0), other=0.0)
    tl.store(initial + seq * SIZE + index, held, mask=index < SIZE)


@triton.jit
def _scatter_kernel(
    final: tl.tensor,
    state: tl.tensor,
    cu_seqlens: tl.tensor,
    state_indices: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy a block of one sequence's final state to the pool; slot 0 stores nothing.

    Grid: (sequences, elements / BLOCK). Tile: BLOCK elements; sequences without tokens are skipped.
    """
    seq = tl.program_id(0).to(tl.int64)
    slot = tl.load(state_indices + seq).to(tl.int64)
    if (slot == 0) | (tl.load(cu_seqlens + seq) == tl.load(cu_seqlens + seq + 1)):
        return
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(final + seq * SIZE + index, mask=index < SIZE)
    tl.store(state + slot * SIZE + index, left, mask=index < SIZE)
