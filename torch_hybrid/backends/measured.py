"""Fastest implementation on a device, from tables of measurements; read when one is chosen.

A table is a file ``tables/<device>.json`` beside this module, which ``benchmarks.gpu.choose``
writes from a run of ``benchmarks.gpu``. Nothing is timed here. For what a table lacks, the order of
IMPLEMENTATIONS decides.
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
AS_FAST = 1.03  # ratio of times that count as equal: two runs of one kernel differ as much


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Measured times of one op at one class of shapes.

    Attributes:
        op: name of the op.
        form: execution form of the implementations, where the op has several.
        dtype: name of a need's dtype, such as "bfloat16".
        sizes: sizes that a need must equal; sizes that are not named may be any.
        features: features of a need, exactly these.
        us: microseconds of each implementation, the geometric mean over the measured lengths.
    """

    op: str
    form: str
    dtype: str
    sizes: Mapping[str, int]
    features: frozenset[str]
    us: Mapping[str, float]

    def is_of(self, op: str, need: Need) -> bool:
        """Tell whether the row is about ``op`` for such a need."""
        return (
            self.op == op
            and self.dtype == str(need.dtype).removeprefix("torch.")
            and self.features == need.features
            and all(need.sizes.get(name) == size for name, size in self.sizes.items())
        )

    def __str__(self) -> str:
        """Describe the class of shapes: "num_heads 16, rank 512, extend"."""
        sizes = [f"{name} {size}" for name, size in self.sizes.items()]
        return ", ".join([*sizes, *sorted(self.features)]) or "any size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """Fastest implementation, and the measurements that decided.

    Attributes:
        impl: the fastest, or one that is as fast and comes before it.
        device: name of the GPU.
        rows: rows of the table, one for each need.
        us: microseconds of each measured implementation, summed over the rows.
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
        """Explain why the implementation ``name`` was not chosen."""
        if name not in self.us:
            return "it was not measured here"
        slower = self.us[name] > self.us[self.impl]
        return f"{self.impl} is {'faster' if slower else 'as fast, and comes first'}"


def fastest(op: str, needs: Sequence[Need], able: Sequence[str]) -> Fastest | None:
    """Find the fastest of the implementations ``able`` for all ``needs`` together.

    Of those within ``AS_FAST`` of the fastest, the first one wins. None unless every need has a
    row, and some implementation has a time in all of these rows.
    """
    found = [_row(op, need, able) for need in needs]
    rows = [row for row in found if row is not None]
    total = {name: sum(row.us[name] for row in rows) for name in able
             if all(name in row.us for row in rows)}  # fmt: skip
    if len(rows) < len(found) or not rows or not total:
        return None
    least = min(total.values())
    chosen = next(name for name, us in total.items() if us <= AS_FAST * least)
    device = device_name(needs[0].device)
    return Fastest(impl=chosen, device=device, rows=tuple(rows), us=total)


def _row(op: str, need: Need, able: Sequence[str]) -> Row | None:
    """Find the row about ``op`` and the form of ``able`` for a need, if there is one."""
    rows = (row for row in table(device_name(need.device)) if able[0].startswith(row.form))
    return next((row for row in rows if row.is_of(op, need)), None)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU; "" for a CPU, which has no table, and on a host without CUDA."""
    is_here = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if is_here else ""


def table_of(device: str) -> Path:
    """Return the path of the table of devices of that name."""
    return TABLES / f"{re.sub(r'[^a-z0-9]+', '_', device.lower())}.json"


@cache
def table(device: str) -> tuple[Row, ...]:
    """Read the table of devices of that name; empty if there is none."""
    file = table_of(device)
    if not device or not file.exists():
        return ()
    content = json.loads(file.read_text(encoding="utf-8"))
    return tuple(
        Row(
            op=row["op"],
            form=row["form"],
            dtype=row["dtype"],
            sizes=row["sizes"],
            features=frozenset(row["features"]),
            us=row["us"],
        )
        for row in content["rows"]
    )
