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
        self._taken: set[int] = set()

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
        if not count:
            return []
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        self._taken.update(taken)
        return taken

    def give_back(self, ids: Sequence[int]) -> None:
        """Take ids back; nothing changes unless all of them can be.

        Raises:
            ValueError: an id is null, unknown, repeated, or was given back already.
        """
        given = set(ids)
        if not given <= self._taken:
            wrong = next(i for i in ids if i not in self._taken)
            raise ValueError(f"{self._unit} {wrong} is not in use and cannot be given back")
        if len(given) != len(ids):
            raise ValueError(f"{self._unit}s given back twice in one call: {list(ids)}")
        self._taken -= given
        self._free.extend(ids)
