"""Runs every Triton kernel under compute-sanitizer, in parts side by side.

    python -m tests.ops.sanitize_kernels [--tools memcheck racecheck] [--jobs 12] [--logs FOLDER]

Each part is a process of ``tests.ops.every_kernel``, which compiles its kernels itself; a second
tool finds them compiled. Tensors are not cut out of torch's cache but lie apart, so that an access
past the end of one is seen. Exits with 1 if a tool reports an error, a part fails or is not done in
time, or a kernel is launched by none. compute-sanitizer comes with the CUDA toolkit.

Two kinds of racecheck's hazards are counted and are no errors. Lanes of one warp store to one place
by one instruction: a sum over lanes leaves its copies equal up to the last bit, since each lane
fuses its own product with the sum, and Triton lets all that hold a copy store it. And kernels in
Gluon, whose warps wait for each other at barriers that asynchronous copies and products arrive at.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch

from tests.ops import kernels
from tests.ops.every_kernel import never_launched
from tests.ops.kernels import short_name
from torch_hybrid.ops.triton.devices import runs_gluon

GLUON = {name for _, name in kernels.all_kernels() - kernels.all_kernels(gluon=False)}
# What torch's calls of the driver return is torch's affair. Hazards, not what is made of them,
# say which threads.
OPTIONS = {
    "memcheck": ("--report-api-errors", "no", "--print-limit", "50"),
    "racecheck": ("--racecheck-report", "hazard", "--print-limit", "2000"),
}
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
TOOLKIT = Path("/usr/local/cuda/bin/compute-sanitizer")
FOUND = 9  # exit status of a part in which a tool found something
NO_RESULT = -1  # of one that was ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one process left.

    Attributes:
        name: the tool and which part.
        status: what the process exited with, NO_RESULT where it was ended for its time.
        log: what the tool and the process wrote.
    """

    name: str
    status: int
    log: str

    def launched(self) -> set[kernels.Kernel]:
        """The kernels that ran to their end."""
        lines = re.findall(r"^launched: (\S+) (\S+)$", self.log, re.MULTILINE)
        return {(module, name) for module, name in lines}

    def findings(self) -> Counter[str]:
        """What the tool reports, and how often: its words, and the kernel."""
        return Counter(block.text for block in blocks(self.log) if block.is_error)

    def counted(self) -> int:
        """How many of its hazards are no errors."""
        return sum(not block.is_error for block in blocks(self.log))

    def wrong(self) -> list[str]:
        """Lines that say what is wrong with it; none where nothing is."""
        found = [f"{self.name}: {count} x {text}" for text, count in self.findings().items()]
        if self.status == NO_RESULT:
            found.append(f"{self.name}: not done in time, after {_last_line(self.log)!r}")
        elif self.status and not found and not (self.status == FOUND and self.counted()):
            found.append(f"{self.name}: exit status {self.status}: {_last_line(self.log)!r}")
        return found


@dataclass(frozen=True, slots=True)
class Block:
    """Lines of the tool that belong together: the first says what, the next ones where."""

    lines: tuple[str, ...]

    @property
    def kernel(self) -> str:
        found = re.search(r"\w+_kernel\w*|ZN2at\w+", " ".join(self.lines))
        return found[0] if found else "no kernel"

    @property
    def text(self) -> str:
        """Without what differs from thread to thread."""
        return f"{re.sub(r'0x[0-9a-f]+|[(][0-9,]+[)]', '..', self.lines[0])[:120]} in {self.kernel}"

    @property
    def is_error(self) -> bool:
        """Whether it is none of the hazards that the module's docstring speaks of."""
        is_hazard = "hazard detected" in self.lines[0]
        return not is_hazard or not (self._is_of_one_store() or short_name(self.kernel) in GLUON)

    def _is_of_one_store(self) -> bool:
        """Whether both accesses are stores of one warp, by one instruction."""
        pattern = r"Write Thread [(](\d+),0,0[)] at (\S+)"
        stores = [match for line in self.lines if (match := re.match(pattern, line))]
        return len(stores) == 2 and len({(int(x[1]) // 32, x[2]) for x in stores}) == 1


def blocks(log: str) -> Iterator[Block]:
    """What the tool reports."""
    marked = (line.removeprefix("=========") for line in log.splitlines() if line[:9] == "=" * 9)
    lines = [line.strip() for line in marked]
    first = re.compile(r"Error|Warning|Invalid|Misaligned|Uninitialized|Barrier|Program hit")
    for at, line in enumerate(lines):
        if first.match(line):
            rest = takewhile(lambda text: text and not first.match(text), lines[at + 1 :])
            yield Block((line, *rest))


def _last_line(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith("=====")]
    return lines[-1][:160] if lines else ""


def sanitizer() -> str:
    """Where compute-sanitizer is."""
    found = shutil.which("compute-sanitizer") or (str(TOOLKIT) if TOOLKIT.exists() else None)
    if found is None:
        raise SystemExit(f"compute-sanitizer is neither on the PATH nor {TOOLKIT}")
    return found


def command(tool: str, part: int, num_parts: int) -> list[str]:
    """What runs one part under a tool."""
    return [
        *(sanitizer(), "--tool", tool, "--error-exitcode", str(FOUND), *OPTIONS.get(tool, ())),
        *("--target-processes", "application-only"),  # not what compiles kernels
        *(sys.executable, "-u", "-m", "tests.ops.every_kernel"),
        *("--part", str(part), str(num_parts)),
    ]


def run(tool: str, num_parts: int, late: float, logs: Path) -> Iterator[Part]:
    """All parts at once; those that are not done at ``late`` are ended."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    files = [logs / f"{tool}.{part}.log" for part in range(num_parts)]
    started = []
    for part, file in enumerate(files):
        with file.open("w") as log:
            started.append(subprocess.Popen(command(tool, part, num_parts), env=environment,
                                            stdout=log, stderr=subprocess.STDOUT))  # fmt: skip
    for part, (process, file) in enumerate(zip(started, files, strict=True)):
        try:
            status = process.wait(max(0.0, late - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = NO_RESULT
        log_text = file.read_text(errors="replace")
        yield Part(name=f"{tool} {part}/{num_parts}", status=status, log=log_text)


def report(tool: str, parts: Sequence[Part]) -> list[str]:
    """What is wrong with a tool's parts together."""
    wrong = [line for part in parts for line in part.wrong()]
    if all(part.status in (0, FOUND) for part in parts):
        launched = set().union(*(part.launched() for part in parts))
        gluon = runs_gluon(torch.device("cuda"))
        wrong += [f"{tool}: {line}" for line in never_launched(launched, gluon=gluon)]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS[:2])
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) * 3 // 4))
    parser.add_argument("--seconds", type=float, default=600.0, help="for each tool, at most")
    parser.add_argument("--logs", type=Path, default=Path("build/sanitize_kernels"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tests.ops.sanitize_kernels needs a CUDA device")
    options.logs.mkdir(parents=True, exist_ok=True)
    wrong = []
    for tool in options.tools:
        begin = time.monotonic()
        parts = list(run(tool, options.jobs, begin + options.seconds, options.logs))
        found = report(tool, parts)
        num_kernels = len(set().union(*(part.launched() for part in parts)))
        took = time.monotonic() - begin
        counted = sum(part.counted() for part in parts)
        more = f", {counted} hazards that are none" if counted else ""
        print(f"{tool}: {num_kernels} kernels, {len(found)} findings{more} [{took:.0f} s]")
        print(*found, sep="\n", flush=True)
        wrong += found
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
