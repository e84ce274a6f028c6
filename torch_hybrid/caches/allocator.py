"""Ids of a pool: handed out once, taken back once, 0 never."""

from __future__ import annotations

from collections.abc import Sequence

from torch_hybrid.errors import CapacityError


class Allocator:
    """Hands out the ids 1 to ``capacity`` of a pool; id 0 is null and stays in the pool's hands."""

    def __init__(self, capacity: int, *, unit: str, limit: str) -> None:
        """``unit`` names what is handed out and ``limit`` the argument that raises ``capacity``."""
        if capacity < 1:
            raise ValueError(f"{limit} must allow at least one {unit}, got {capacity}")
        self.capacity = capacity
        self._unit, self._limit = unit, limit
        self._free = list(range(capacity, 0, -1))
        self._taken = [False] * (capacity + 1)

    @property
    def num_free(self) -> int:
        """How many ids can still be taken."""
        return len(self._free)

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
        taken = [self._free.pop() for _ in range(count)]
        for i in taken:
            self._taken[i] = True
        return taken

    def give_back(self, ids: Sequence[int]) -> None:
        """Take ids back; nothing changes unless all of them can be.

        Raises:
            ValueError: an id is null, unknown, repeated, or was given back already.
        """
        for i in ids:
            if not 0 < i <= self.capacity or not self._taken[i]:
                raise ValueError(f"{self._unit} {i} is not in use and cannot be given back")
        if len(set(ids)) != len(ids):
            raise ValueError(f"{self._unit}s given back twice in one call: {list(ids)}")
        for i in ids:
            self._taken[i] = False
        self._free.extend(ids)
