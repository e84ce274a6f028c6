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

from torch_hybrid.ops.capability import Need

TABLES = Path(__file__).with_name("tables")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """An implementation, and the figures that say so."""

    impl: str
    device: str
    us: Mapping[str, float]

    def __str__(self) -> str:
        figures = sorted(self.us.items(), key=lambda item: item[1])
        shown = ", ".join(f"{name} {us:.3g} us" for name, us in figures)
        return f"measured on {self.device}: {shown}"


def fastest(op: str, needs: Sequence[Need], able: Sequence[str]) -> Fastest | None:
    """The fastest for all ``needs`` together, of the implementations ``able`` that were measured.

    None where one of the needs was not.
    """
    device, total = "", dict.fromkeys(able, 0.0)
    for need in needs:
        device = device_name(need.device)
        row = next((row for row in table(device) if row.is_of(op, need)), None)
        if row is None:
            return None
        total = {name: us + row.us[name] for name, us in total.items() if name in row.us}
    if not total or not device:
        return None
    return Fastest(impl=min(total, key=total.__getitem__), device=device, us=total)


def device_name(device: torch.device) -> str:
    """What a GPU calls itself; "" for a CPU, of which there are no tables."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


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
