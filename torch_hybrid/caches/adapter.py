"""Adapter of sequences: which one, and where its factors are."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(eq=False, slots=True)
class Adapter:
    """Adapter that sequences may have: one load of a folder by a name, whatever slot it is in.

    Attributes:
        name: by which requests ask for it.
        number: of the load, from 1; no other of the runner has it.
        folder: of its files; None of one that came from memory, which stays in its slot.
        stamp: of the files when they were read.
        slot: in the pools, from 1; 0 while it is in none.
        last_used: number of the last start of a sequence with it.
    """

    name: str
    number: int
    folder: Path | None
    stamp: tuple[int, ...] = ()
    slot: int = 0
    last_used: int = 0


def check_loaded(name: str, loaded: Collection[str]) -> None:
    """Raise ValueError unless an adapter of this name is among the loaded ones."""
    if name not in loaded:
        raise ValueError(f"no adapter {name!r} is loaded; loaded are {sorted(loaded)}")


def slot_of(adapter: Adapter | None) -> int:
    """Return the slot of an adapter; 0 of none."""
    return 0 if adapter is None else adapter.slot
