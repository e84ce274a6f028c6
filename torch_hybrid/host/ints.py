"""Tensors of Python ints, which every step packs: faster than ``torch.tensor``."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from struct import error as StructError
from struct import pack
from typing import Any

import torch
from torch import Tensor

_MANY_INTS = 64  # from so many on, two copies cost less than a look at the type of each


def int_tensor(values: Iterable[int], dtype: torch.dtype) -> Tensor:
    """As ``torch.tensor`` for int32 and int64, in a third of its time: it looks for their type."""
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
    """``array(kind, values)``, of many in half of its time.

    Raises:
        TypeError: one is no integer.
        OverflowError: one is too large.
    """
    if len(values) < _MANY_INTS:
        return array(kind, values)
    try:
        return array(kind, pack(f"{len(values)}{kind}", *values))
    except StructError:  # which does not say what is wrong
        return array(kind, values)


def plain_ints(values: list[Any]) -> array[int] | None:
    """``array("q", values)`` of ints; None where some are something else (bools too) or too large.

    Of many ints, in half of the time of a look at the type of each: a sum is an int only of ints
    and of bools.
    """
    try:
        packed = packed_ints(values, "q")
        is_plain = type(sum(values)) is int and not has_bools(values, packed)
    except (TypeError, OverflowError):
        return None
    return packed if is_plain else None


def has_bools(values: Sequence[Any], packed: array[int]) -> bool:
    """Whether there are some among values, which an array of them takes for 0 and 1."""
    if len(values) < _MANY_INTS:
        return bool in map(type, values)
    ints = int_tensor(packed, torch.int64)
    if ints.min() > 1:
        return False
    return any(type(values[place]) is bool for place in (ints <= 1).nonzero().flatten().tolist())


def joined(rows: Sequence[Sequence[int]]) -> Tensor:
    """The rows of ints one after another, [T] int64; of one array of type "q", its memory.

    Raises:
        OverflowError: one has more than 64 bits.
    """
    if len(rows) == 1:
        return int_tensor(rows[0], torch.int64)
    if sum(map(len, rows)) < 4 * len(rows):  # one by one: to add an array takes longer
        return int_tensor(chain.from_iterable(rows), torch.int64)
    packed = array("q")
    for row in rows:
        packed.extend(row)
    return int_tensor(packed, torch.int64)
