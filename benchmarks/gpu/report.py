"""The tables and the JSON of a run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.gpu.case import Cell, Line, fastest
from benchmarks.gpu.clock import Rates
from benchmarks.gpu.steps import Step
from benchmarks.results import Results

PACKAGES = ("torch", "triton", "flash-linear-attention", "fla-core", "flashinfer-python",
            "nvidia-cutlass-dsl", "transformers")  # fmt: skip
NOT_INSTALLED = "not installed"


def surroundings() -> dict[str, str]:
    """The GPU and the versions that figures belong to."""
    return {
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda or "none",
        "cudnn": str(torch.backends.cudnn.version()),
    } | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def op_table(lines: Sequence[Line], rates: Rates) -> Results:
    """A line for each case: its floor, each contestant, and the best of ours over both."""
    names = list(dict.fromkeys(name for line in lines for name in line.others))
    results = Results(
        title=f"Ops, bfloat16, microseconds; {rates}",
        columns=("op", "model", "shape", "floor", "ours", "by", *names, "/ floor", "/ best other"),
    )
    for line in lines:
        best, other = line.best, fastest(line.others)
        ours = line.own[best].us if best else None
        rival = line.others[other].us if other else None
        results.add(
            line.op,
            line.model,
            line.shape,
            line.floor_us,
            _shown(line.own[best]) if best else "",
            best or "",
            *(_shown(line.others.get(name)) for name in names),
            ours / line.floor_us if ours else "",
            ours / rival if ours and rival else "",
        )
    results.notes += _notes(lines)
    return results


def _shown(cell: Cell | None) -> str:
    if cell is None or cell.us is None:
        return ""
    digits = f"{cell.us:.0f}" if cell.us >= 100 else f"{cell.us:.1f}"
    return digits if cell.captured else f"{digits}*"


def _notes(lines: Sequence[Line]) -> Iterator[str]:
    """Why cells are blank: each reason once, with the cases that it holds of."""
    why: dict[tuple[str, str], list[str]] = defaultdict(list)
    for line in lines:
        for name, cell in line.cells.items():
            if cell.why_not:
                why[name, cell.why_not].append(f"{line.op} {line.shape}")
    for (name, reason), cases in why.items():
        shown = ", ".join(cases[:4]) + (f" and {len(cases) - 4} more" if len(cases) > 4 else "")
        yield f"blank: {name}: {reason} ({shown})"
    if any(not c.captured for line in lines for c in line.cells.values() if c.us):
        yield "* launched one after another: it could not be captured in a CUDA graph"


def step_table(steps: Sequence[Step]) -> Results:
    """A line for each step: its floor, its times, and its kernels by group."""
    results = Results(
        title="Steps at Qwen3-Next's widths, 8 layers, bfloat16, captured; milliseconds",
        columns=(
            *("step", "floor", "device", "busy", "synchronised", "/ floor", "host"),
            *("engine", "engine / floor", "kernels"),
        ),
    )
    for step in steps:
        engine = step.engine_ms
        number = sum(count for _, count in step.kernels.groups.values())
        results.add(
            step.name,
            step.floor_ms,
            step.device_ms,
            step.kernels.busy_ms,
            step.synchronised_ms,
            step.synchronised_ms / step.floor_ms,
            step.host_ms,
            *(("", "") if engine is None else (engine, engine / step.floor_ms)),
            number,
        )
        groups = (f"{g} {us:.0f} us ({n})" for g, (us, n) in step.kernels.groups.items())
        results.notes.append(f"{step.name}: {', '.join(groups)}")
    return results


def as_json(
    lines: Sequence[Line], steps: Sequence[Step], rates: Rates, failures: Sequence[str]
) -> dict[str, Any]:
    """All of it, with the reason of each blank cell."""
    return {
        "on": surroundings(),
        "rates": asdict(rates),
        "ops": [asdict(line) | {"best": line.best} for line in lines],
        "steps": [asdict(step) for step in steps],
        "failures": list(failures),
    }
