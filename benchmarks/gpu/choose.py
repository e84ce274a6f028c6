"""Writes the table of a device: which implementation of an op was measured to be the fastest.

    python -m benchmarks.gpu --json gpu.json
    python -m benchmarks.gpu.choose gpu.json [MORE.json ...] [--folder torch_hybrid/backends/tables]

Several runs are of the parts that were run apart (``benchmarks.gpu --parts``), of one device and
the same versions; a case of two runs counts as the later says. What a table of these versions has
and the runs do not stays in it; one of other versions is replaced. A row is an op at one class of
shapes, as runners choose: the sizes of a layer and the features that a step needs. Its figures are
geometric means over the lengths that were measured, of the implementations that have a figure at
every one of them. Where fewer than two have, there is nothing to choose, and no row.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import NOT_INSTALLED
from torch_hybrid.backends import measured

VERSIONS = ("torch", "triton", "flashinfer-python")
DTYPE = "bfloat16"  # of all that benchmarks.gpu measures


def rows(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The table's rows, of the lines of a run."""
    found = []
    for choice, members in _classes(lines):
        us = _means([line["own"] for line in members])
        if len(us) > 1:
            found.append({"dtype": DTYPE, **choice, "us": us})
    return found


def costs(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where a row's one answer for all lengths is not the fastest at a length, beyond noise."""
    found = []
    for choice, members in _classes(lines):
        us = _means([line["own"] for line in members])
        for line in members if len(us) > 1 else ():
            here = {name: line["own"][name]["us"] for name in us}
            first, best = next(iter(us)), min(here, key=here.__getitem__)
            if here[first] > measured.AS_FAST * here[best]:
                found.append(f"{choice['op']} {line['model']} {line['shape']}: {first} takes "
                             f"{here[first]:.1f} us, {best} {here[best]:.1f}")  # fmt: skip
    return found


def _classes(
    lines: Sequence[Mapping[str, Any]],
) -> list[tuple[dict[str, Any], list[Mapping[str, Any]]]]:
    """Each choice that runners make, and the lines that were measured of it."""
    classes: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["choice"] is not None:
            classes[json.dumps(line["choice"], sort_keys=True)].append(line)
    return [(json.loads(key), members) for key, members in sorted(classes.items())]


def _means(cells: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, float]:
    """Of each implementation that was measured in all lines, the fastest first."""
    names = [name for name in cells[0] if all(name in c and c[name]["us"] for c in cells)]
    means = {name: math.exp(sum(math.log(c[name]["us"]) for c in cells) / len(cells))
             for name in names}  # fmt: skip
    return {name: round(us, 2) for name, us in sorted(means.items(), key=lambda item: item[1])}


def together(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines of several runs."""
    lines = [line for run in runs for line in run["ops"]]
    return list({(line["op"], line["model"], line["shape"]): line for line in lines}.values())


def the_one(name: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """The device of several runs, or the version of what was installed in all that had it.

    Raises:
        ValueError: there are several.
    """
    found = {run["on"][name] for run in runs}
    if len(installed := found - {NOT_INSTALLED}) > 1:
        raise ValueError(f"runs must be of one {name}, got {sorted(installed)}")
    return (installed or found).pop()


def write(runs: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Write the table of the runs' device; what was written, or why nothing was."""
    device, versions = the_one("device", runs), {name: the_one(name, runs) for name in VERSIONS}
    lines = together(runs)
    table = rows(lines)
    if not table:
        return f"{device}: no op was measured with two implementations: no table"
    file = folder / measured.table_of(device).name
    kept = [row for row in _rows_of(file, versions) if _class(row) not in map(_class, table)]
    content = {"device": device, "versions": versions, "rows": sorted(kept + table, key=_class)}
    folder.mkdir(exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")
    shown = (f"{row['op']} {row['sizes']}: {row['us']}" for row in table)
    return "\n".join([str(file), *shown, *(f"but {cost}" for cost in costs(lines))])


def _rows_of(file: Path, versions: Mapping[str, str]) -> list[dict[str, Any]]:
    """What a table of these versions has; nothing where it is of others."""
    content = json.loads(file.read_text()) if file.exists() else {"versions": None}
    found: list[dict[str, Any]] = content["rows"] if content["versions"] == versions else []
    return found


def _class(row: Mapping[str, Any]) -> str:
    """What a row is of, in the order of a table."""
    return json.dumps({name: row[name] for name in sorted({*row} - {"us"})}, sort_keys=True)


def main() -> None:
    """Write it, and show it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="what benchmarks.gpu wrote with --json")
    parser.add_argument("--folder", type=Path, default=measured.TABLES)
    options = parser.parse_args()
    print(write([json.loads(run.read_text()) for run in options.runs], options.folder))


if __name__ == "__main__":
    main()
