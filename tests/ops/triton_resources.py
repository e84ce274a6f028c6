"""What compiled kernels take, held against tables that stand beside the tests.

A table belongs to one Triton, that of constraints.txt: with another one its numbers are not
compared, and the test warns. Its last column is a digest of what was compiled, which takes seconds:
a kernel that has the same at a launch is not compiled again. After a change that is meant to change
numbers, this compiles all of them and writes the tables anew:

    EXPECTTEST_ACCEPT=1 python -m pytest tests/ops -k compiles_without_spills
"""

from __future__ import annotations

import difflib
import importlib.metadata
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import expecttest

from tests.ops.triton_compile import (
    SHARED_LIMITS,
    Launch,
    Resources,
    compile_launch,
    digest_of,
    title,
)

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
ACCEPT = "EXPECTTEST_ACCEPT=1 python -m pytest tests/ops -k compiles_without_spills"
# A column's title and width, and the field that it shows.
COLUMNS = (
    ("kernel: shape", -48, "kernel"),
    ("target", -7, "target"),
    ("warps", 5, "num_warps"),
    ("registers", 9, "registers"),
    ("spilled", 7, "stack"),
    ("shared", 7, "shared"),
    ("cp.async", 8, "async_copies"),
    ("tma", 4, "tensor_copies"),
    ("wgmma", 5, "wgmma"),
    ("tcgen05", 7, "tcgen05"),
    ("mma", 5, "mma"),
    ("ir", 12, "ir"),
)


def resources_of(launch: Launch, target: str, label: str) -> Resources:
    """What the recorded launch takes on ``target``; ``label`` says at which shape.

    Out of a table where the very same was compiled before, else compiled.
    """
    if importlib.metadata.version("triton") != table_version():
        return compile_launch(launch, target, label)
    ir = digest_of(launch, target)
    known = None if expecttest.ACCEPT else held_rows().get(ir)
    if known is not None:
        return replace(known, kernel=title(launch, label))
    return replace(compile_launch(launch, target, label), ir=ir)


@cache
def held_rows() -> Mapping[str, Resources]:
    """The rows of all tables of this Triton, by digest."""
    rows = {}
    for table in Path(__file__).parent.glob("*/resources*.txt"):
        version, _, *held = table.read_text().splitlines()
        if version == _header():
            rows |= {row.ir: row for row in map(_row, held)}
    return rows


def _row(line: str) -> Resources:
    width = -COLUMNS[0][1]
    fields = [field for _, _, field in COLUMNS[1:]]
    cells: dict[str, Any] = dict(zip(fields, line[width:].split(), strict=True))
    numbers = {f: int(cell) for f, cell in cells.items() if f not in ("target", "ir")}
    return Resources(kernel=line[:width].strip(), **cells | numbers)


def _header() -> str:
    return f"# triton {table_version()}"


def assert_all_fit(
    rows: Sequence[Resources], table: Path, *, may_spill: Mapping[str, int] = {}
) -> None:
    """No spills, no more shared memory than a block may have, and all else as in ``table``.

    ``may_spill``: bytes by the kernel's name, or by that of a row, where it was measured to be
    faster.
    """
    for row in rows:
        limit = SHARED_LIMITS[row.target]
        name, _, _ = row.kernel.partition(":")
        allowed = may_spill.get(row.kernel, may_spill.get(name, 0))
        assert row.stack <= allowed, f"{row.kernel} spills {row.stack} bytes a thread: {row}"
        assert row.shared <= limit, f"over {limit} bytes of shared memory: {row}"
    assert_as_in_table(rows, table)


def resources_at(
    shapes: Mapping[str, tuple[Any, ...]],
    record: Callable[..., Mapping[str, Launch]],
    note: Callable[[Launch], str] = lambda launch: "",
) -> list[Resources]:
    """What all launches that ``record`` notes at each shape take on each target; ``note`` ends
    their labels."""
    return [
        resources_of(launch, target, label + note(launch))
        for label, shape in shapes.items()
        for target in SHARED_LIMITS
        for launch in record(target, *shape).values()
    ]


def assert_shapes_fit(
    folder: Path,
    shapes: Mapping[str, tuple[Any, ...]],
    record: Callable[..., Mapping[str, Launch]],
    note: Callable[[Launch], str] = lambda launch: "",
) -> None:
    """They fit, as in the table of ``folder``."""
    assert_all_fit(resources_at(shapes, record, note), folder / "resources.txt")


def assert_as_in_table(rows: Sequence[Resources], table: Path) -> None:
    """The rows are those of ``table``, to the number, if it is of the Triton that is installed."""
    held, installed = table_version(), importlib.metadata.version("triton")
    if installed != held:
        what = f"{table.name} holds numbers of triton {held}, triton {installed} is installed"
        warnings.warn(f"{what}: looked for spills alone", stacklevel=3)
        return
    text = "\n".join([_header(), *lines(rows), ""])
    if expecttest.ACCEPT:
        table.write_text(text)
        return
    expected = table.read_text() if table.exists() else ""
    numbers, as_held = _without_digests(text), _without_digests(expected)
    assert numbers == as_held, _difference(as_held, numbers, table)
    if text != expected:
        what = f"{table.name}: kernels changed, their numbers did not: they are compiled each time"
        warnings.warn(f"{what}, until {ACCEPT}", stacklevel=3)


def _without_digests(table: str) -> list[str]:
    """Its lines; the first is the version."""
    width = COLUMNS[-1][1] + 1
    version, *rows = table.splitlines() or [""]
    return [version, *(row[:-width] for row in rows)]


def table_version() -> str:
    """The Triton that the tables are of."""
    found = re.search(r"^triton==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert found is not None, f"no triton in {CONSTRAINTS}"
    return found[1]


def lines(rows: Sequence[Resources]) -> Iterator[str]:
    """The titles and a line for each row, in columns that do not move with what they hold."""
    yield _aligned([title for title, _, _ in COLUMNS])
    for row in rows:
        yield _aligned([str(getattr(row, field)) for _, _, field in COLUMNS])


def _aligned(cells: Sequence[str]) -> str:
    return " ".join(
        cell.ljust(-width) if width < 0 else cell.rjust(width)
        for cell, (_, width, _) in zip(cells, COLUMNS, strict=True)
    )


def _difference(expected: list[str], found: list[str], table: Path) -> str:
    changed = difflib.unified_diff(expected, found, table.name, "as compiled", n=0, lineterm="")
    titles = found[1]
    return "\n".join(["kernels take something else than their table says", f" {titles}", *changed,
                      f"if this is meant: {ACCEPT}"])  # fmt: skip
