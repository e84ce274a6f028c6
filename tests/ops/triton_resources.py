"""What compiled kernels take, held against tables that stand beside the tests.

A table belongs to one Triton, that of constraints.txt: with another one its numbers are not
compared, and the test warns. After a change that is meant to change them:

    EXPECTTEST_ACCEPT=1 python -m pytest tests/ops -k compiles_without_spills
"""

from __future__ import annotations

import difflib
import importlib.metadata
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import expecttest

from tests.ops.triton_compile import SHARED_LIMITS, Resources

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
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
)


def assert_all_fit(rows: Sequence[Resources], table: Path) -> None:
    """No spills, no more shared memory than a block may have, and all else as in ``table``."""
    for row in rows:
        limit = SHARED_LIMITS[row.target]
        assert row.stack == 0, f"{row.kernel} spills {row.stack} bytes a thread: {row}"
        assert row.shared <= limit, f"over {limit} bytes of shared memory: {row}"
    assert_as_in_table(rows, table)


def assert_as_in_table(rows: Sequence[Resources], table: Path) -> None:
    """The rows are those of ``table``, to the number, if it is of the Triton that is installed."""
    held, installed = table_version(), importlib.metadata.version("triton")
    if installed != held:
        what = f"{table.name} holds numbers of triton {held}, triton {installed} is installed"
        warnings.warn(f"{what}: looked for spills alone", stacklevel=3)
        return
    text = "\n".join([f"# triton {held}", *lines(rows), ""])
    if expecttest.ACCEPT:
        table.write_text(text)
        return
    expected = table.read_text() if table.exists() else ""
    assert text == expected, _difference(expected, text, table)


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


def _difference(expected: str, text: str, table: Path) -> str:
    changed = difflib.unified_diff(
        expected.splitlines(), text.splitlines(), table.name, "as compiled", n=0, lineterm=""
    )
    titles = text.splitlines()[1]
    accept = "if this is meant: EXPECTTEST_ACCEPT=1 python -m pytest tests/ops -k compiles"
    return "\n".join(["kernels take something else than their table says", f" {titles}", *changed,
                      accept])  # fmt: skip
