"""Ids of a pool: handed out, shared, and taken back when nobody holds them; 0 never."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

import torch

from torch_hybrid.errors import CapacityError
from torch_hybrid.host.ints import int_tensor

_FIRM = 1 << 32  # what a firm hold adds to an id's holds; one to spare adds 1
_FEW = 32  # ids that are looked at one by one: for more, tensors take less time

# The holds of some ids in order, and how many ids after one another have as many: sequences own
# runs of pages that are held alike.
_Runs = list[tuple[int, int]]


class Allocator:
    """Hands out the ids 1 to ``capacity`` of a pool; id 0 is null and stays in the pool's hands.

    Whoever takes an id holds it firmly. Others may come to hold it too, firmly or to spare, which
    is to give it back when asked: it is free again when the last of them has given it back.
    """

    def __init__(self, capacity: int, *, unit: str, limit: str) -> None:
        """``unit`` names what is handed out and ``limit`` the argument that raises ``capacity``."""
        if capacity < 1:
            raise ValueError(f"{limit} must allow at least one {unit}, got {capacity}")
        self.capacity = capacity
        self._unit, self._limit = unit, limit
        self._free = array("i", range(capacity, 0, -1))
        # The holds of each id, and the same memory as a tensor.
        self._holds = array("q", bytes(8 * (capacity + 1)))
        self._all_holds = torch.frombuffer(self._holds, dtype=torch.int64)
        self._one = torch.ones(1, dtype=torch.int64, device="cpu")
        self._num_spare = 0

    @property
    def num_free(self) -> int:
        """How many ids can still be taken."""
        return len(self._free)

    @property
    def num_spare(self) -> int:
        """How many ids are held to spare alone."""
        return self._num_spare

    def take(self, count: int) -> array[int]:
        """Hand out ``count`` ids, or none at all.

        Raises:
            CapacityError: fewer are free.
        """
        if count > len(self._free):
            raise CapacityError(
                f"asked for {count} {self._unit}(s), {len(self._free)} of {self.capacity} are "
                f"free: free sequences or raise {self._limit}"
            )
        first_taken = len(self._free) - count
        taken = self._free[first_taken:]
        taken.reverse()
        del self._free[first_taken:]
        self._add(taken, _FIRM)
        return taken

    def share(self, ids: Sequence[int], *, spare: bool = False) -> None:
        """Hold ids that are in use once more each; they are distinct."""
        holds = self._holds_of(ids)
        assert not _count(holds, _is_free)
        if not spare:
            self._num_spare -= _count(holds, _is_spare)
        self._add(ids, 1 if spare else _FIRM)

    def give_back(self, ids: Sequence[int], *, spare: bool = False) -> None:
        """Give up a hold of each id; nothing changes unless all of them can be given back.

        Args:
            ids: distinct.
            spare: the holds that are given up are to spare.

        Raises:
            ValueError: an id is null, unknown, repeated, or was given back already.
        """
        holds = self._checked(ids)
        assert not _count(holds, _is_not_spare if spare else _is_not_firm)
        self._add(ids, -1 if spare else -_FIRM)
        num_freed = _count(holds, _is_last_spare if spare else _is_last)
        self._num_spare += -num_freed if spare else _count(holds, _is_last_firm)
        if num_freed == len(ids):
            self._free.extend(ids)
        elif num_freed:
            self._free.extend(i for i in ids if not self._holds[i])

    def give_back_each(self, ids: Iterable[int]) -> None:
        """As ``give_back``, of ids that may repeat: that many holds of them."""
        for i in ids:
            self.give_back([i])

    def count_spare(self, ids: Sequence[int]) -> int:
        """How many of these are held to spare alone."""
        return _count(self._holds_of(ids), _is_spare)

    def count_firm_once(self, ids: Sequence[int]) -> int:
        """How many of these are held firmly by one holder alone."""
        return _count(self._holds_of(ids), _is_firm_once)

    def _holds_of(self, ids: Sequence[int]) -> _Runs:
        """The holds of each id; IndexError where one is of no such pool."""
        if len(ids) >= _FEW:
            holds = self._all_holds.index_select(0, int_tensor(ids, torch.int32))
            runs = torch.unique_consecutive(holds, return_counts=True)
            return list(zip(*(each.tolist() for each in runs), strict=True))
        if min(ids, default=0) < 0:
            raise IndexError(min(ids))
        return [(self._holds[i], 1) for i in ids]

    def _add(self, ids: Sequence[int], change: int) -> None:
        """Add to the holds of each id."""
        if len(ids) >= _FEW:
            each = self._one.expand(len(ids))
            self._all_holds.index_add_(0, int_tensor(ids, torch.int32), each, alpha=change)
        else:
            for i in ids:
                self._holds[i] += change

    def _checked(self, ids: Sequence[int]) -> _Runs:
        """The holds of each id, if all are in use and distinct."""
        try:
            holds = self._holds_of(ids)
            are_in_use = not _count(holds, _is_free)
        except IndexError:
            are_in_use = False
        if not are_in_use:
            wrong = next(i for i in ids if not (0 < i <= self.capacity and self._holds[i]))
            raise ValueError(f"{self._unit} {wrong} is not in use and cannot be given back")
        if len(set(ids)) != len(ids):
            raise ValueError(f"{self._unit}s given back twice in one call: {list(ids)}")
        return holds


def _count(runs: _Runs, are_so: Callable[[int], bool]) -> int:
    """How many ids are so, by their holds."""
    return sum(count for holds, count in runs if are_so(holds))


def _is_free(holds: int) -> bool:
    return holds == 0


def _is_spare(holds: int) -> bool:
    return 0 < holds < _FIRM


def _is_not_spare(holds: int) -> bool:
    return holds % _FIRM == 0


def _is_not_firm(holds: int) -> bool:
    return holds < _FIRM


def _is_firm_once(holds: int) -> bool:
    return _FIRM <= holds < 2 * _FIRM


def _is_last(holds: int) -> bool:
    """Whether an id is held by one holder alone, firmly."""
    return holds == _FIRM


def _is_last_firm(holds: int) -> bool:
    """Whether an id is held firmly by one holder, and by others to spare."""
    return _FIRM < holds < 2 * _FIRM


def _is_last_spare(holds: int) -> bool:
    """Whether an id is held by one holder alone, to spare."""
    return holds == 1
