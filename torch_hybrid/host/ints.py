"""Fast conversion of Python ints to tensors: every step packs some."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import index as index_of
from struct import error as StructError
from struct import pack
from typing import Any, SupportsIndex

import torch
from torch import Tensor

_MANY_INTS = 64  # from this count on, two copies cost less than a look at each type


def is_int(given: object) -> bool:
    """Tell whether an argument is an integer; a bool is none."""
    return isinstance(given, SupportsIndex) and not isinstance(given, bool)


def check_int(name: str, given: object) -> None:
    """Raise TypeError unless an argument is an integer."""
    if not is_int(given):
        raise TypeError(f"{name} must be an integer, got {given!r}")


def int_tensor(values: Iterable[int], dtype: torch.dtype) -> Tensor:
    """Make an int32 or int64 tensor of Python ints.

    It takes a third of the time of ``torch.tensor``, which looks up the type of each value.
    """
    kind = "i" if dtype is torch.int32 else "q"
    if isinstance(values, array) and values.typecode == kind:
        packed = values
    elif isinstance(values, list):
        packed = packed_ints(values, kind)
    else:
        packed = array(kind, values)
    if not packed:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(packed, dtype=dtype)


def packed_ints(values: Sequence[int], kind: str) -> array[int]:
    """Pack ints into ``array(kind, values)``; many of them in half of its time.

    Raises:
        TypeError: a value is no integer.
        OverflowError: a value is too large.
    """
    if len(values) < _MANY_INTS:
        return array(kind, values)
    try:
        return array(kind, pack(f"{len(values)}{kind}", *values))
    except StructError:  # it does not say what is wrong
        return array(kind, values)


def plain_ints(values: list[Any]) -> array[int] | None:
    """Pack values into ``array("q", values)`` if all are ints that fit; else return None.

    Bools count as no ints. The check of many values is their sum: its type is int only if each is
    an int or a bool. That takes half of the time of a look at each type.
    """
    try:
        packed = packed_ints(values, "q")
        is_plain = type(sum(values)) is int and not has_bools(values, packed)
    except (TypeError, OverflowError):
        return None
    return packed if is_plain else None


def has_bools(values: Sequence[Any], packed: array[int]) -> bool:
    """Tell whether there are bools among values, which their array holds as 0 and 1."""
    if len(values) < _MANY_INTS:
        return bool in map(type, values)
    ints = int_tensor(packed, torch.int64)
    if ints.min() > 1:
        return False
    return any(type(values[place]) is bool for place in (ints <= 1).nonzero().flatten().tolist())


def counts_of(name: str, values: Iterable[Any]) -> list[int]:
    """Convert counts to ints: a tensor that is kept as a count grows in each place that keeps it.

    Raises:
        TypeError: a value is no integer.
    """
    try:
        return list(map(index_of, values))
    except TypeError:
        raise TypeError(f"{name} must be integers, got {values!r}") from None


def joined(rows: Sequence[Sequence[int]]) -> Tensor:
    """Concatenate rows of ints, [T] int64; a single array of type "q" shares its memory.

    Raises:
        OverflowError: a value has more than 64 bits.
    """
    if len(rows) == 1:
        return int_tensor(rows[0], torch.int64)
    if sum(map(len, rows)) < 4 * len(rows):  # short rows: extending by an array takes longer
        return int_tensor(chain.from_iterable(rows), torch.int64)
    packed = array("q")
    for row in rows:
        packed.extend(row)
    return int_tensor(packed, torch.int64)
