"""Which implementation was measured to be the fastest on a device; asked when one is chosen.

A table is a file ``tables/<device>.json`` beside this module, which ``benchmarks.gpu.choose``
writes of a run of ``benchmarks.gpu``. Nothing is timed here, and what a table does not have is not
guessed: the order of IMPLEMENTATIONS holds for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from torch_hybrid.ops.core.capability import Need

TABLES = Path(__file__).with_name("tables")
AS_FAST = 1.03  # times of the same kernel in two runs are as far apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One op at one class of shapes.

    Attributes:
        op: its name where it is chosen.
        dtype: "bfloat16".
        sizes: that a caller's must equal; those that are not named may be any.
        features: that a caller wants, exactly these.
        us: microseconds of each implementation, the geometric mean over the measured lengths.
    """

    op: str
    dtype: str
    sizes: Mapping[str, int]
    features: frozenset[str]
    us: Mapping[str, float]

    def is_of(self, op: str, need: Need) -> bool:
        """Whether this is what was measured of ``op`` for such a caller."""
        return (
            self.op == op
            and self.dtype == str(need.dtype).removeprefix("torch.")
            and self.features == need.features
            and all(need.sizes.get(name) == size for name, size in self.sizes.items())
        )

    def __str__(self) -> str:
        """ "num_heads 16, rank 512, extend"."""
        sizes = [f"{name} {size}" for name, size in self.sizes.items()]
        return ", ".join([*sizes, *sorted(self.features)]) or "any size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """An implementation, and the figures that say so.

    Attributes:
        impl: the fastest, or one that is as fast and comes before it.
        device: what the GPU calls itself.
        rows: that were asked, one for each need.
        us: microseconds of each implementation that was measured, of all rows together.
    """

    impl: str
    device: str
    rows: tuple[Row, ...]
    us: Mapping[str, float]

    def __str__(self) -> str:
        figures = sorted(self.us.items(), key=lambda item: item[1])
        shown = ", ".join(f"{name} {us:.3g} us" for name, us in figures)
        return f"measured on {self.device} at {' and at '.join(map(str, self.rows))}: {shown}"

    def why_not(self, name: str) -> str:
        """Why it is not an implementation of that name."""
        if name not in self.us:
            return "it was not measured here"
        slower = self.us[name] > self.us[self.impl]
        return f"{self.impl} is {'faster' if slower else 'as fast, and comes first'}"


def fastest(op: str, needs: Sequence[Need], able: Sequence[str]) -> Fastest | None:
    """The fastest for all ``needs`` together, of the implementations ``able`` that were measured;
    the first of those that are within ``AS_FAST`` of it.

    None where one of the needs was not measured.
    """
    found = [_row(op, need) for need in needs]
    rows = [row for row in found if row is not None]
    total = {name: sum(row.us[name] for row in rows) for name in able
             if all(name in row.us for row in rows)}  # fmt: skip
    if len(rows) < len(found) or not rows or not total:
        return None
    least = min(total.values())
    chosen = next(name for name, us in total.items() if us <= AS_FAST * least)
    device = device_name(needs[0].device)
    return Fastest(impl=chosen, device=device, rows=tuple(rows), us=total)


def _row(op: str, need: Need) -> Row | None:
    """What was measured for a caller, if anything was."""
    rows = table(device_name(need.device))
    return next((row for row in rows if row.is_of(op, need)), None)


def device_name(device: torch.device) -> str:
    """What a GPU calls itself; "" for a CPU, of which there are no tables, or a GPU elsewhere."""
    is_here = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if is_here else ""


def table_of(device: str) -> Path:
    """The file of a device of that name."""
    return TABLES / f"{re.sub(r'[^a-z0-9]+', '_', device.lower())}.json"


@cache
def table(device: str) -> tuple[Row, ...]:
    """What was measured on devices of that name."""
    file = table_of(device)
    if not device or not file.exists():
        return ()
    content = json.loads(file.read_text(encoding="utf-8"))
    return tuple(
        Row(
            op=row["op"],
            dtype=row["dtype"],
            sizes=row["sizes"],
            features=frozenset(row["features"]),
            us=row["us"],
        )
        for row in content["rows"]
    )
