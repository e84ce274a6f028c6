"""Runs the C++ ops' contract suites, and an engine, with every access of the kernels checked.

    python -m tests.hostile.sanitize [pytest's arguments]

The kernels are built with AddressSanitizer and UndefinedBehaviorSanitizer, whose runtime must come
first in a process: so python is started anew with it preloaded. It sees malloc, and so an access
past the end of any tensor that is not cut from a larger one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torch_hybrid.ops.native.build import SANITIZE, _find_compiler

CHECKS = "address,undefined"
FAMILIES = sorted({path.parent.name for path in Path("ops").glob("*/_cpu*")})
TRAINED = "functional and (test_contract and (gated or kimi) or conv1d)"
SUITES = (
    *(f"tests/ops/{family}" for family in FAMILIES),
    "tests/functional",
    "tests/hostile/test_indices.py",
    "tests/ops/test_declared_op.py",
    "tests/host/test_surroundings.py",
    "-k",
    f"(cpp or hostile or state_copy or {TRAINED}) and not opcheck and not compile and not triton",
)


def runtime() -> list[str]:
    """The libraries that are preloaded; none where the compiler lacks one.

    The runtime looks for ``__cxa_throw`` when it starts, and python does not link libstdc++: the
    first error that an op raises would end the process.
    """
    compiler = _find_compiler()
    found = (
        [_library(compiler, name) for name in ("libasan.so", "libstdc++.so")] if compiler else []
    )
    return [str(path) for path in found] if all(path.is_absolute() for path in found) else []


def _library(compiler: str, name: str) -> Path:
    """Where a library of the compiler lies; just its name when it has none."""
    command = [compiler, f"-print-file-name={name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Path(done.stdout.strip())


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run python so; its output is captured."""
    environment = {
        **os.environ,
        SANITIZE: CHECKS,
        "LD_PRELOAD": " ".join(runtime()),
        # Python keeps what it allocates until it ends; what a kernel leaks is not sought here.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def run_tests(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest so. It captures nothing: the report of an access is the process's last word."""
    return run_python("-m", "pytest", "-q", "-x", "-s", *arguments)


def main() -> int:
    if not runtime():
        print("the C++ compiler has no AddressSanitizer runtime (libasan.so)")
        return 2
    done = run_tests(*(sys.argv[1:] or SUITES))
    print(done.stdout[-20_000:], done.stderr[-20_000:])
    if not done.returncode:
        print(f"clean: {', '.join(FAMILIES)}, and an engine's runs")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
