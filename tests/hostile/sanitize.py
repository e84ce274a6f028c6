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
FAMILIES = sorted(path.parent.name for path in Path("ops").glob("*/_cpu.cpp"))
SUITES = (
    *(f"tests/ops/{family}" for family in FAMILIES),
    "tests/hostile/test_indices.py",
    "tests/hostile/test_surroundings.py",
    "-k",
    "(cpp or hostile or state_copy) and not opcheck and not compile and not triton",
)


def runtime() -> Path | None:
    """The library that is preloaded, where the compiler has one."""
    compiler = _find_compiler()
    if compiler is None:
        return None
    command = [compiler, "-print-file-name=libasan.so"]
    path = Path(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    return path if path.is_absolute() and path.exists() else None


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run pytest so; its output is captured."""
    environment = {
        **os.environ,
        SANITIZE: CHECKS,
        "LD_PRELOAD": str(runtime()),
        # Python keeps what it allocates until it ends; what a kernel leaks is not sought here.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def main() -> int:
    if runtime() is None:
        print("the C++ compiler has no AddressSanitizer runtime (libasan.so)")
        return 2
    done = run(sys.argv[1:] or list(SUITES))
    print(done.stdout[-20_000:], done.stderr[-20_000:])
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
