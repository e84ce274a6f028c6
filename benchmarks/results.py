"""How a benchmark is called and what it prints: a table, then a line for each target."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.models import FAMILIES
from torch_hybrid.host.malloc import tune_allocator

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure to reach: at most ``limit``, or at least."""

    name: str
    measured: float
    limit: float
    at_least: bool = False
    unit: str = "x"

    @property
    def is_met(self) -> bool:
        """Whether the measured figure is on the right side of the limit."""
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return (
            f"target {self.name}: {sign} {self.limit:g}{self.unit}, "
            f"measured {self.measured:.3g}{self.unit}, met: {'yes' if self.is_met else 'no'}"
        )


@dataclass(slots=True, kw_only=True)
class Results:
    """What one benchmark found."""

    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Append a row; numbers get three significant digits."""
        self.rows.append([_cell(cell) for cell in cells])

    def text(self) -> str:
        """An aligned table, the notes and the targets."""
        lines = [list(self.columns), *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        table = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        return "\n".join([self.title, *table, *self.notes, *map(str, self.targets)])

    def markdown(self) -> str:
        """The same as Markdown."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        table = ["| " + " | ".join(line) + " |" for line in lines]
        tail = [f"- {line}" for line in (*self.notes, *map(str, self.targets))]
        return "\n".join([f"### {self.title}", "", *table, "", *tail, ""])

    def emit(self, options: argparse.Namespace) -> None:
        """Print, and write the files that the command line asked for."""
        print(self.text(), flush=True)
        if options.json:
            targets = [asdict(target) | {"met": target.is_met} for target in self.targets]
            content = asdict(self) | {"targets": targets}
            options.json.write_text(json.dumps(content, indent=1) + "\n")
        if options.markdown:
            options.markdown.write_text(self.markdown())


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def arguments(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has; the caller adds its own and parses."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", choices=FAMILIES, default="qwen3_next")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--threads", type=int, help="torch threads (default: all cores)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write them as Markdown")
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option of benchmarks that run on a GPU too."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line, and set this process up as a server would."""
    options = parser.parse_args()
    options.torch_dtype = DTYPES[options.dtype]
    tune_allocator()
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


def title(options: argparse.Namespace, what: str) -> str:
    """What was run, on what."""
    count = torch.get_num_threads()
    threads = "1 thread (its own time)" if count == 1 else f"{count} threads"
    if getattr(options, "device", "cpu") == "cuda":
        threads = torch.cuda.get_device_name()
    sizes = ", tiny sizes" if options.quick else ""
    return f"{what}: {options.model}, {options.dtype}, {threads}{sizes}"
