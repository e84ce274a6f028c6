"""Allocator of a pool's ids: ids are taken, shared, and free again once nobody holds them.

Holds are firm or spare. A spare hold is revocable: its holder gives it back when the pool runs
short.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from torch_hybrid.errors import CapacityError
from torch_hybrid.host.ints import int_tensor

_FIRM = 1 << 32  # what a firm hold adds to an id's holds; a spare one adds 1
_FEW = 32  # ids up to which a loop is faster than tensors

# Run-length encoded holds of some ids, in order: sequences own long runs of pages that are held
# alike.
_Runs = list[tuple[int, int]]


@dataclass(eq=False)
class Allocator:
    """Allocator of the ids 1 to ``capacity`` of a pool; id 0 is null and is never handed out.

    Taking an id holds it firmly. Others may share it, with a firm or a spare hold. An id is free
    again once its last hold is given back.

    Raises:
        ValueError: ``capacity`` is below 1.
    """

    capacity: int  # number of ids
    unit: str  # name of one id's resource, for errors
    limit: str  # argument that raises ``capacity``, for errors

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(
                f"{self.limit} must allow at least one {self.unit}, got {self.capacity}"
            )
        self._free = array("i", range(self.capacity, 0, -1))
        # The holds of each id, and the same memory as a tensor.
        self._holds = array("q", bytes(8 * (self.capacity + 1)))
        self._all_holds = torch.frombuffer(self._holds, dtype=torch.int64)
        self._one = torch.ones(1, dtype=torch.int64, device="cpu")
        self._num_spare = 0

    @property
    def num_free(self) -> int:
        """Number of ids that nobody holds."""
        return len(self._free)

    @property
    def num_spare(self) -> int:
        """Number of ids that have spare holds alone."""
        return self._num_spare

    def take(self, count: int) -> array[int]:
        """Hand out ``count`` ids, or none at all.

        Raises:
            CapacityError: fewer are free.
        """
        if count > len(self._free):
            raise CapacityError(
                f"asked for {count} {self.unit}(s), {len(self._free)} of {self.capacity} are "
                f"free: free sequences or raise {self.limit}"
            )
        first_taken = len(self._free) - count
        taken = self._free[first_taken:]
        taken.reverse()
        del self._free[first_taken:]
        self._add(taken, _FIRM)
        return taken

    def share(self, ids: Sequence[int], *, spare: bool = False) -> None:
        """Add a hold to each of some distinct ids, which are in use."""
        holds = self._holds_of(ids)
        assert not _count(holds, _is_free)
        if not spare:
            self._num_spare -= _count(holds, _is_spare)
        self._add(ids, 1 if spare else _FIRM)

    def give_back(self, ids: Sequence[int], *, spare: bool = False) -> None:
        """Give back a hold of each id; nothing changes unless all of them can be given back.

        Args:
            ids: distinct ids.
            spare: give back spare holds instead of firm ones.

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
        """Give back a firm hold of each id, once for each time that the id occurs."""
        for i in ids:
            self.give_back([i])

    def count_spare(self, ids: Sequence[int]) -> int:
        """Count the ids that have spare holds alone."""
        return _count(self._holds_of(ids), _is_spare)

    def count_firm_once(self, ids: Sequence[int]) -> int:
        """Count the ids that have exactly one firm hold."""
        return _count(self._holds_of(ids), _is_firm_once)

    def _holds_of(self, ids: Sequence[int]) -> _Runs:
        """List the holds of each id, as runs; IndexError if an id is outside of the pool."""
        if len(ids) >= _FEW:
            holds = self._all_holds.index_select(0, int_tensor(ids, torch.int32))
            runs = torch.unique_consecutive(holds, return_counts=True)
            return list(zip(*(each.tolist() for each in runs), strict=True))
        if min(ids, default=0) < 0:
            raise IndexError(min(ids))
        return [(self._holds[i], 1) for i in ids]

    def _add(self, ids: Sequence[int], change: int) -> None:
        """Add ``change`` to the holds of each id."""
        if len(ids) >= _FEW:
            each = self._one.expand(len(ids))
            self._all_holds.index_add_(0, int_tensor(ids, torch.int32), each, alpha=change)
        else:
            for i in ids:
                self._holds[i] += change

    def _checked(self, ids: Sequence[int]) -> _Runs:
        """Check that all ids are in use and distinct, and list their holds."""
        try:
            holds = self._holds_of(ids)
            are_in_use = not _count(holds, _is_free)
        except IndexError:
            are_in_use = False
        if not are_in_use:
            wrong = next(i for i in ids if not (0 < i <= self.capacity and self._holds[i]))
            raise ValueError(f"{self.unit} {wrong} is not in use and cannot be given back")
        if len(set(ids)) != len(ids):
            raise ValueError(f"{self.unit}s given back twice in one call: {list(ids)}")
        return holds


def _count(runs: _Runs, are_so: Callable[[int], bool]) -> int:
    """Count the ids whose holds satisfy a predicate."""
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
    """Tell whether an id has one firm hold and no other."""
    return holds == _FIRM


def _is_last_firm(holds: int) -> bool:
    """Tell whether an id has one firm hold, and spare ones."""
    return _FIRM < holds < 2 * _FIRM


def _is_last_spare(holds: int) -> bool:
    """Tell whether an id has one spare hold and no other."""
    return holds == 1
