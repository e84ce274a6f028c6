"""Checks of tensors with a row for each token, and the two execution forms of a recurrence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from torch import Tensor

from torch_hybrid.ops.core.capability import Implementation

RECURRENT, CHUNK = "recurrent", "chunk"  # execution forms: token by token, chunk by chunk
CHUNK_SIZES = (16, 32, 64, 128)
DEFAULT_CHUNK_SIZE = 32


def in_forms(
    *, recurrent: Mapping[str, Implementation], chunk: Mapping[str, Implementation]
) -> dict[str, Implementation]:
    """Join the implementations of both execution forms of an op: "recurrent_cpp", "chunk_cpp"."""
    forms = {RECURRENT: recurrent, CHUNK: chunk}
    return {f"{form}_{name}": each for form, named in forms.items() for name, each in named.items()}


def of_form(implementations: Mapping[str, Implementation], form: str) -> dict[str, Implementation]:
    """Find the implementations of one execution form; "" finds all."""
    return {name: each for name, each in implementations.items() if name.startswith(form)}


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


def check_rows(**tensors: Tensor) -> None:
    """Raise ValueError for the first tensor whose rows are not dense."""
    for name, tensor in tensors.items():
        if not has_dense_rows(tensor):
            fail_rows(name, tensor)


def fail_rows(name: str, x: Tensor) -> NoReturn:
    """Raise the ValueError for a tensor whose rows are not dense."""
    raise ValueError(f"{name} must have contiguous rows, got strides {list(x.stride())}")
