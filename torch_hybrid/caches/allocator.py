"""Ids of a pool: handed out, shared, and taken back when nobody holds them; 0 never."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch_hybrid.errors import CapacityError


@dataclass(slots=True)
class _Holders:
    """How many hold an id firmly, and how many would give it back when asked."""

    firm: int = 0
    spare: int = 0


class Allocator:
    """Hands out the ids 1 to ``capacity`` of a pool; id 0 is null and stays in the pool's hands.

    Whoever takes an id holds it firmly. Others may come to hold it too, firmly or to spare: it is
    free again when the last of them has given it back.
    """

    def __init__(self, capacity: int, *, unit: str, limit: str) -> None:
        """``unit`` names what is handed out and ``limit`` the argument that raises ``capacity``."""
        if capacity < 1:
            raise ValueError(f"{limit} must allow at least one {unit}, got {capacity}")
        self.capacity = capacity
        self._unit, self._limit = unit, limit
        self._free = list(range(capacity, 0, -1))
        self._taken: set[int] = set()
        self._shared: dict[
            int, _Holders
        ] = {}  # those of the taken that one firm hold is not all of
        self._num_spare = 0

    @property
    def num_free(self) -> int:
        """How many ids can still be taken."""
        return len(self._free)

    @property
    def num_spare(self) -> int:
        """How many ids are held to spare alone."""
        return self._num_spare

    def take(self, count: int) -> list[int]:
        """Hand out ``count`` ids, or none at all.

        Raises:
            CapacityError: fewer are free.
        """
        if count > len(self._free):
            raise CapacityError(
                f"asked for {count} {self._unit}(s), {len(self._free)} of {self.capacity} are "
                f"free: free sequences or raise {self._limit}"
            )
        if not count:
            return []
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        self._taken.update(taken)
        return taken

    def share(self, ids: Iterable[int], *, spare: bool = False) -> None:
        """Hold ids that are in use once more each."""
        for i in ids:
            assert i in self._taken
            holders = self._shared.setdefault(i, _Holders(firm=1))
            if spare:
                holders.spare += 1
            else:
                self._num_spare -= not holders.firm
                holders.firm += 1

    def give_back(self, ids: Sequence[int], *, spare: bool = False) -> None:
        """Give up a hold of each id; nothing changes unless all of them can be given back.

        Args:
            ids: distinct.
            spare: the holds that are given up are to spare.

        Raises:
            ValueError: an id is null, unknown, repeated, or was given back already.
        """
        given = set(ids)
        if not given <= self._taken:
            wrong = next(i for i in ids if i not in self._taken)
            raise ValueError(f"{self._unit} {wrong} is not in use and cannot be given back")
        if len(given) != len(ids):
            raise ValueError(f"{self._unit}s given back twice in one call: {list(ids)}")
        shared = given & self._shared.keys()
        freed = [i for i in ids if i not in shared or self._is_left(i, spare=spare)]
        self._taken.difference_update(freed)
        self._free.extend(freed)

    def give_back_each(self, ids: Iterable[int]) -> None:
        """As ``give_back``, of ids that may repeat: that many holds of them."""
        for i in ids:
            self.give_back([i])

    def _is_left(self, i: int, *, spare: bool) -> bool:
        """Whether nobody holds a shared id any more, once a hold of it is given up."""
        holders = self._shared[i]
        self._num_spare -= not holders.firm
        if spare:
            holders.spare -= 1
        else:
            holders.firm -= 1
        assert holders.firm >= 0 <= holders.spare
        self._num_spare += not holders.firm and holders.spare > 0
        if not holders.spare and holders.firm < 2:
            del self._shared[i]
        return not holders.firm and not holders.spare

    def count_spare(self, ids: Iterable[int]) -> int:
        """How many of these are held to spare alone."""
        shared = self._shared
        return sum(i in shared and not shared[i].firm for i in ids)

    def count_firm_once(self, ids: Iterable[int]) -> int:
        """How many of these are held firmly by one holder alone."""
        shared = self._shared
        return sum(i not in shared or shared[i].firm == 1 for i in ids)
