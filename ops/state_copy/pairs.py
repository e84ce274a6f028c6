"""Checks of the index pairs, for implementations whose indices are on the host."""

from __future__ import annotations

from collections.abc import Sequence


def check_pairs(src: Sequence[int], dst: Sequence[int], size: int) -> None:
    """Raise ValueError unless the pairs are in range, dst unique, and src and dst disjoint."""
    for name, indices in (("src", src), ("dst", dst)):
        if indices and not 0 <= min(indices) <= max(indices) < size:
            outside = next(index for index in indices if not 0 <= index < size)
            raise ValueError(f"{name} must be in [0, {size}), got {outside}")
    targets = [index for index in dst if index]
    if len(set(targets)) != len(targets):
        twice = next(index for index in targets if targets.count(index) > 1)
        raise ValueError(f"dst must not repeat, got {twice} twice")
    sources = {s for s, d in zip(src, dst, strict=True) if s and d}
    if not sources.isdisjoint(targets):
        shared = sorted(sources.intersection(targets))
        raise ValueError(f"src and dst must be disjoint, got {shared} in both")
