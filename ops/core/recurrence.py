"""Checks that every op with a recurrent state makes of its arguments.

Such an op takes per-token tensors [T, ...], in which the tokens of all sequences are packed one
after the other. It updates a pool of states in place, by slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torch_hybrid.ops.core.registration import check_contiguous, check_dtypes, check_shapes

CHUNK_SIZES = (16, 32, 64, 128)
DEFAULT_CHUNK_SIZE = 32


def check_heads(**tensors: Tensor) -> None:
    """Raise ValueError for the first tensor that is not [tokens, heads, dim]."""
    for name, tensor in tensors.items():
        if tensor.ndim != 3:
            raise ValueError(f"{name} must have 3 dimensions, got {list(tensor.shape)}")


def check_tokens(
    expected: Mapping[str, tuple[Tensor | None, Sequence[int], torch.dtype]],
) -> None:
    """Raise ValueError for the first per-token tensor of a wrong shape, dtype or layout.

    Rows, one per token, may lie any distance apart (a slice of a wider tensor, or 0 for one row
    that serves all tokens); one row must be dense.
    """
    check_shapes({name: (tensor, shape) for name, (tensor, shape, _) in expected.items()})
    check_dtypes({name: (tensor, dtype) for name, (tensor, _, dtype) in expected.items()})
    for name, (tensor, _, _) in expected.items():
        if tensor is not None and not has_dense_rows(tensor):
            strides = list(tensor.stride())
            raise ValueError(f"{name} must have contiguous rows, got strides {strides}")


def check_slots(
    state: Tensor,
    shape: Sequence[int],
    cu_seqlens: Tensor,
    initial_indices: Tensor,
    state_indices: Tensor,
) -> None:
    """Raise ValueError unless ``state`` is a float32 pool of ``shape``, indexed by sequence."""
    num_seqs = state_indices.shape[0]
    check_shapes(
        {
            "state": (state, (state.shape[0], *shape)),
            "cu_seqlens": (cu_seqlens, (num_seqs + 1,)),
            "initial_indices": (initial_indices, (num_seqs,)),
            "state_indices": (state_indices, (num_seqs,)),
        }
    )
    check_dtypes(
        {
            "state": (state, torch.float32),
            "cu_seqlens": (cu_seqlens, torch.int32),
            "initial_indices": (initial_indices, torch.int32),
            "state_indices": (state_indices, torch.int32),
        }
    )
    check_contiguous(
        state=state,
        cu_seqlens=cu_seqlens,
        initial_indices=initial_indices,
        state_indices=state_indices,
    )


def check_chunk_size(chunk_size: int) -> None:
    """Raise ValueError when ``chunk_size`` is not one of CHUNK_SIZES."""
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size must be one of {list(CHUNK_SIZES)}, got {chunk_size}")


def has_dense_rows(tensor: Tensor, apart: int = 1) -> bool:
    """Tell whether each row of a tensor is dense, however far apart rows lie.

    Args:
        tensor: [..., *row].
        apart: how many dimensions are before those of a row.
    """
    dense = 1
    row = reversed(tensor.shape[apart:])
    for size, stride in zip(row, reversed(tensor.stride()), strict=False):
        if size > 1 and stride != dense:
            return False
        dense *= size
    return True
