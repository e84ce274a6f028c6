"""What is read from the words of compute-sanitizer; it runs on a GPU alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.ops import kernels, sanitize_kernels
from tests.ops.sanitize_kernels import FOUND, NO_RESULT, Part

CLEAN = """\
========= COMPUTE-SANITIZER
ssd, recurrent float32
launched: ssd recurrent
launched: triton attend
2 kernels launched
========= ERROR SUMMARY: 0 errors
"""
OVERRUN = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at _scan_kernel+0x1e70
=========     by thread (33,0,0) in block (1,0,0)
=========     Address 0x7f21be3ffe00 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f21be3ffc00 of size 512 bytes
========= Invalid __global__ write of size 4 bytes
=========     at _scan_kernel+0x1e80
=========     by thread (34,0,0) in block (1,0,0)
launched: gated_delta_rule scan
========= ERROR SUMMARY: 2 errors
"""
HAZARD = """\
========= Error: Potential WAW hazard detected at __shared__ 0x418 in block (1,0,0) :
=========     Write Thread ({first},0,0) at {kernel}+0x1600 in delta_recurrent.py:148
=========     Write Thread ({second},0,0) at {kernel}+{offset} in delta_recurrent.py:148
=========     Current Value : 236, Incoming Value : 237
=========
=========     Saved host backtrace up to driver entry point at kernel launch time
========= RACECHECK SUMMARY: 1 hazards displayed (1 errors, 0 warnings)
"""
LANES = HAZARD.format(first=15, second=16, kernel="_recurrent_kernel", offset="0x1600")
WARPS = HAZARD.format(first=31, second=32, kernel="_recurrent_kernel", offset="0x1600")
STORES = HAZARD.format(first=15, second=16, kernel="_recurrent_kernel", offset="0x1700")
GLUON = HAZARD.format(first=31, second=32, kernel="_hopper_down_kernel", offset="0x1700")
READS = STORES.replace("Write Thread (15", "Read Thread (15").replace("WAW", "RAW")
SAID = "tool 0/2: 1 x Error: Potential {} hazard detected at __shared__ .. in block .. : in {}"


def part(log: str, status: int = 0) -> Part:
    return Part(name="tool 0/2", status=status, log=log)


@pytest.mark.parametrize(
    ("made", "wrong"),
    [
        (part(CLEAN), []),
        (
            part(OVERRUN, FOUND),
            ["tool 0/2: 2 x Invalid __global__ write of size 4 bytes in _scan_kernel"],
        ),
        (part(LANES, FOUND), []),
        (part(GLUON, FOUND), []),
        (part(WARPS, FOUND), [SAID.format("WAW", "_recurrent_kernel")]),
        (part(STORES, FOUND), [SAID.format("WAW", "_recurrent_kernel")]),
        (part(READS + LANES, FOUND), [SAID.format("RAW", "_recurrent_kernel")]),
        (part(CLEAN, NO_RESULT), ["tool 0/2: not done in time, after '2 kernels launched'"]),
        (part("No module named torch", 1), ["tool 0/2: exit status 1: 'No module named torch'"]),
        (part("", FOUND), ["tool 0/2: exit status 9: ''"]),
    ],
    ids=["clean", "overrun", "lanes of a store", "Gluon", "warps", "two stores", "a read", "late",
         "broken", "found and not read"],
)  # fmt: skip
def test_what_is_wrong_has_a_line(made: Part, wrong: list[str]) -> None:
    assert made.wrong() == wrong


def test_a_kernel_that_no_part_launched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = sorted(kernels.all_kernels())[-1]
    lines = "\n".join(f"launched: {a} {b}" for a, b in kernels.all_kernels() - {missing})
    monkeypatch.setattr(sanitize_kernels, "runs_gluon", lambda _: True)
    [line] = sanitize_kernels.report("racecheck", [part(CLEAN), part(lines)])
    assert line == f"racecheck: never launched: {missing[0]} {missing[1]}"
    assert sanitize_kernels.report("racecheck", [part(lines, NO_RESULT)]) == [
        f"tool 0/2: not done in time, after {lines.splitlines()[-1]!r}"
    ]


def test_parts_run_side_by_side_and_late_ones_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = ["echo launched: ssd recurrent", "echo here; exec sleep 60", "exit 3"]
    monkeypatch.setattr(
        sanitize_kernels, "command", lambda _tool, part, _parts: ["sh", "-c", scripts[part]]
    )
    late = sanitize_kernels.time.monotonic() + 0.3
    done = list(sanitize_kernels.run("memcheck", 3, late, tmp_path))
    assert [each.status for each in done] == [0, NO_RESULT, 3]
    assert done[0].launched() == {("ssd", "recurrent")}
    assert done[1].wrong() == ["memcheck 1/3: not done in time, after 'here'"]


def test_a_part_is_every_nth_call_under_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize_kernels, "sanitizer", lambda: "compute-sanitizer")
    line = subprocess.list2cmdline(sanitize_kernels.command("racecheck", 2, 12))
    assert line.startswith("compute-sanitizer --tool racecheck ")
    assert line.endswith("-m tests.ops.every_kernel --part 2 12")
