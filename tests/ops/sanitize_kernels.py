"""Runs every Triton kernel under compute-sanitizer, in parts side by side.

    python -m tests.ops.sanitize_kernels [--tools memcheck racecheck] [--jobs 12] [--logs FOLDER]

Each part is a process of ``tests.ops.every_kernel``, which compiles its kernels itself; a second
tool finds them compiled. Tensors are not cut out of torch's cache but lie apart, so that an access
past the end of one is seen. Exits with 1 if a tool reports an error, a part fails or is not done in
time, or a kernel is launched by none. compute-sanitizer comes with the CUDA toolkit.
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
from pathlib import Path

import torch

from tests.ops import kernels
from tests.ops.every_kernel import never_launched
from torch_hybrid.ops.triton.devices import runs_gluon

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
        return {(folder, name) for folder, name in lines}

    def findings(self) -> Counter[str]:
        """What the tool reports, and how often: its words, and the kernel."""
        return Counter(_findings(self.log))

    def wrong(self) -> list[str]:
        """Lines that say what is wrong with it; none where nothing is."""
        found = [f"{self.name}: {count} x {text}" for text, count in self.findings().items()]
        if self.status == NO_RESULT:
            found.append(f"{self.name}: not done in time, after {_last_line(self.log)!r}")
        elif self.status and not found:
            found.append(f"{self.name}: exit status {self.status}: {_last_line(self.log)!r}")
        return found


def _findings(log: str) -> Iterator[str]:
    """Blocks of the tool's lines, each introduced by "========= "; the first of a block says what
    was found and one of the next where."""
    lines = [line.removeprefix("=========") for line in log.splitlines()
             if line.startswith("=========")]  # fmt: skip
    for at, line in enumerate(lines):
        text = line.removeprefix(" ")
        if re.match(r"(Error|Warning|Invalid|Misaligned|Uninitialized|Barrier|Program hit)", text):
            where = " ".join([text, *lines[at + 1 : at + 6]])
            kernel = re.search(r"\w+_kernel\w*|ZN2at\w+", where)
            yield f"{_without_numbers(text)} in {kernel[0] if kernel else 'no kernel'}"


def _without_numbers(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)", "..", text)[:120]


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
    # What torch's calls of the driver return is torch's affair.
    checks = ["--report-api-errors", "no"] if tool == "memcheck" else []
    return [
        *(sanitizer(), "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"),
        *checks,
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
        print(f"{tool}: {num_kernels} kernels, {len(found)} findings [{took:.0f} s]", flush=True)
        print(*found, sep="\n", flush=True)
        wrong += found
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
